"""TLS handshakes that never come: they are counted from the start, and requests of others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import uvicorn
import uvloop
from serving import PATIENCE, free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tonnage.server.http import tls
from tonnage.server.http.tls import Handshakes


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Run each test on both event loops, which read a new connection at different moments."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a certificate for 127.0.0.1 signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(key), "-out", str(made),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return made, key


async def echo(request: Request) -> PlainTextResponse:
    """Answer with the scheme and the body."""
    return PlainTextResponse(f"{request.url.scheme} {(await request.body()).decode()}")


@contextlib.asynccontextmanager
async def serving(certificate: tuple[Path, Path]) -> AsyncIterator[tuple[str, Handshakes]]:
    """Yield the address of a server whose handshakes are ours, and the handshakes."""
    app = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])
    port = free_port()
    made, key = certificate
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, ws="none", lifespan="off", log_config=None,
        ssl_certfile=str(made), ssl_keyfile=str(key),
    )  # fmt: skip
    config.load()
    assert config.ssl is not None
    handshakes = Handshakes(config.ssl)
    config.http_protocol_class = handshakes  # type: ignore[assignment]
    config.ssl = None
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    async with asyncio.timeout(PATIENCE):
        while not server.started:  # noqa: ASYNC110  (uvicorn has a flag only)
            await asyncio.sleep(0.01)
    try:
        yield f"https://127.0.0.1:{port}", handshakes
    finally:
        server.should_exit = True
        await task


def client(certificate: tuple[Path, Path]) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    return httpx.AsyncClient(verify=context, timeout=PATIENCE)


async def silent(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect without a handshake."""
    return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


async def until_waiting(handshakes: Handshakes, count: int) -> None:
    """Wait until ``count`` handshakes are in progress."""
    async with asyncio.timeout(PATIENCE):
        while len(handshakes.waiting) != count:  # noqa: ASYNC110  (a count, there is no event to wait for)
            await asyncio.sleep(0.01)


async def test_requests_over_tls_are_answered(certificate: tuple[Path, Path]) -> None:
    async with serving(certificate) as (url, handshakes), client(certificate) as http:
        bodies = [f"{at}" * 50_000 for at in range(4)]
        answers = await asyncio.gather(*(http.post(url, content=body) for body in bodies))
        assert [answer.text for answer in answers] == [f"https {body}" for body in bodies]
        assert handshakes.waiting == {}


async def test_silent_tls_connections_are_closed_to_make_room_for_a_request(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "max_connections", lambda: 20)
    monkeypatch.setattr(tls, "CLOSED_AT_ONCE", 5)
    async with serving(certificate) as (url, handshakes), client(certificate) as http:
        held = [await silent(url) for _ in range(20)]
        await until_waiting(handshakes, 20)
        # A connection that has sent nothing has no state of OpenSSL (48 KiB).
        assert all(each._task is None for each in handshakes.waiting)
        assert (await http.get(url)).text == "https "
        closed = 0
        for reader, _ in held[:5]:  # the oldest are closed, and only these
            with contextlib.suppress(ConnectionError):
                closed += await reader.read() == b""
        assert len(handshakes.waiting) == 15
        for _, writer in held:
            writer.close()
        await until_waiting(handshakes, 0)


async def test_connection_that_sends_no_tls_handshake_is_closed_after_a_time_limit(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.2)
    async with serving(certificate) as (url, handshakes):
        reader, writer = await silent(url)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        await until_waiting(handshakes, 0)
        writer.close()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"]
)
async def test_bytes_that_are_no_tls_handshake_close_the_connection(
    certificate: tuple[Path, Path], said: bytes
) -> None:
    async with serving(certificate) as (url, handshakes), client(certificate) as http:
        reader, writer = await silent(url)
        writer.write(said)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        await until_waiting(handshakes, 0)
        assert (await http.get(url)).status_code == 200
        writer.close()
