"""``tonnage serve``: plan, print the plan, load, serve. The pool is what the plan says, or nothing starts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import signal
import socket
import sys
from types import FrameType

import uvicorn

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.server.app import create_app
from tonnage.server.commands.launch import (
    Parser,
    Waiting,
    add_settings,
    make_engine,
    planned,
    settings_from,
    stoppable,
)
from tonnage.server.engines.base import EngineDead
from tonnage.server.state import ServerState

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# Seconds that requests in flight are given at a stop before they are cut off.
_GRACE_SECONDS = 5

_EPILOG = """
Every option is also read from the environment, as TONNAGE_MAX_MODEL_LEN for --max-model-len.

The lines "listening on URL" and "ready on URL" on stdout are for scripts; --port 0 takes a free port.
exit codes: 0 stopped by SIGTERM, 1 the engine failed, 2 bad input or it does not fit, 130 Ctrl-C.

examples:
  tonnage serve demo --kv-cache-memory-bytes 512MiB
  tonnage serve ./Llama-3.1-8B --quantization nf4 --max-model-len 8192 --port 8080
"""


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="tonnage serve",
        description="Plan a model's memory, then serve the OpenAI API, /metrics and /memory from that plan.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(p)
    return p


def run(argv: list[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit code; raises TonnageError before anything started."""
    settings = settings_from(parser().parse_args(argv))
    with stoppable(), listen(settings.host, settings.port) as sock:
        plan = planned(settings, sys.stdout)
        engine = make_engine(settings, plan)
        stop = _Stop()
        app = create_app(settings, engine, on_startup_error=stop.on_error)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_SECONDS
        )
        stop.server = uvicorn.Server(config)
        address = _url(sock)
        print(f"listening on {address}", flush=True)
        asyncio.run(_serve(stop, sock, app.state.tonnage, address))
        return _exit_code(stop)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; taken before the model loads, so that a port in use costs no minute.

    Raises DeploymentError that names host or port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise DeploymentError(
            f"{host!r} is not an address of this machine: {error.strerror}", field="host", hint="try 127.0.0.1"
        ) from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # as uvicorn's own backlog; from now on nobody else gets the port
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise DeploymentError(
                f"{port} on {host} is in use", field="port", hint="stop the other server or take --port 0"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise DeploymentError(
                f"{host!r} is not an address of this machine", field="host", hint="try 127.0.0.1"
            ) from None
        raise DeploymentError(f"cannot listen on {host}:{port}: {error.strerror}", field="port") from None
    return sock


class _Stop:
    """Why and how the server ends: signals and a failed start."""

    def __init__(self) -> None:
        self.server: uvicorn.Server | None = None
        self.error: TonnageError | None = None
        self.signal: int | None = None

    def on_error(self, error: TonnageError) -> None:
        self.error = error
        if self.server is not None:
            self.server.should_exit = True

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        # uvicorn has its own handlers while it serves and raises the signal again when it is done; then
        # this one is in place and keeps the exit code ours.
        self.signal = number
        if self.server is not None:
            self.server.should_exit = True


async def _serve(stop: _Stop, sock: socket.socket, state: ServerState, address: str) -> None:
    assert stop.server is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.on_signal)
    watcher = asyncio.create_task(_announce(state, address))
    await stop.server.serve(sockets=[sock])
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher


async def _announce(state: ServerState, address: str) -> None:
    with Waiting("loading the model") as tick:
        while not state.started and state.startup_error is None:
            tick()
            await asyncio.sleep(0.1)
    if state.started:
        print(f"ready on {address}", flush=True)


def _exit_code(stop: _Stop) -> int:
    if stop.error is not None:
        print(f"tonnage serve: {stop.error}", file=sys.stderr)
        unexpected = type(stop.error) in (TonnageError, EngineDead)
        return FAILED if unexpected else BAD_INPUT
    return INTERRUPTED if stop.signal == signal.SIGINT else OK


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
