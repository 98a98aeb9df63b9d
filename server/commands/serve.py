"""``tonnage serve``: print the plan, load the model with a KV pool of the planned size, and serve the API."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.server.app import create_app
from tonnage.server.commands.launch import (
    ProgressDisplay,
    make_engine,
    plan_for_loading,
    select_backend,
    settings_from,
)
from tonnage.server.commands.stopping import stoppable
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.heap import bound_heap, settle_heap, shrink_heap
from tonnage.server.engines.supervisor import SupervisedEngine
from tonnage.server.http.protocol import BoundedHttpProtocol, raise_file_limit
from tonnage.server.http.tls import Handshakes
from tonnage.server.observe.logs import configure
from tonnage.server.parsers import serve as parser
from tonnage.server.security.keys import load_keys
from tonnage.server.settings import Settings
from tonnage.server.state import ServerState

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

log = logging.getLogger("tonnage.server")

# Seconds that uvicorn gives responses for their last bytes after the drain; longer responses are cut off.
_GRACE_SECONDS = 1

# Maximum number of waits, of 50 ms each, for slow clients to read the last event of their responses.
_LAST_EVENT_TURNS = 100

# Number of connections accepted in one iteration of the event loop. While 5,000 connections arrive with a
# request each, a probe of /health waits in the same backlog. On 2 cores, with the clients of the case `resets`
# of benchmarks/abuse.py, the probe waited at most 2.7 s with 4 connections per iteration, 1.3 s with 8, 0.7 s
# with 16, 0.4 s with 32 and 0.2 s with 64. Each connection per iteration needs a duplicate of the listening
# socket, which is an open file.
ACCEPTED_A_ROUND = 32


def run(argv: list[str]) -> int:
    """Load the model, serve the API until SIGTERM or Ctrl-C, and return the exit code.

    Raises:
        TonnageError: the input is invalid; nothing has been started.
    """
    arguments = parser().parse_args(argv)
    settings = settings_from(arguments)
    if arguments.print_config:
        print(settings.model_dump_json(indent=2))
        return OK
    bound_heap()
    raise_file_limit()
    # The API keys are not used here. The call only checks them, before the model is loaded.
    load_keys(settings.api_key, settings.api_key_file)
    _check_tls(settings)
    configure(settings.log_format, settings.log_level)
    with stoppable(), listen(settings.host, settings.port) as sock:
        settings, source = select_backend(settings, sys.stdout)
        plan = plan_for_loading(settings, source, sys.stdout)
        stop = _Stop(settings.drain_seconds)
        engine = SupervisedEngine(
            lambda: make_engine(settings, plan),
            max_restarts=settings.max_engine_restarts,
            ready_timeout=settings.engine_ready_timeout,
            on_give_up=stop.on_error,
        )
        app = create_app(settings, engine, on_startup_error=stop.on_error)
        stop.state = app.state.tonnage
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            # WebSockets are off: no endpoint uses them, and uvicorn's WebSocket protocol has no limits
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
        _load(config)
        # uvicorn alone does not count connections in their TLS handshake; Handshakes counts and bounds them
        if config.ssl is not None:
            config.http_protocol_class = Handshakes(config.ssl)  # type: ignore[assignment]
            config.ssl = None
        stop.server = Server(config)
        address = _url(sock, settings)
        print(f"listening on {address}", flush=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(stop, sock, app.state.tonnage, address))
        return _exit_code(stop)


def _check_tls(settings: Settings) -> None:
    """Raise DeploymentError for a TLS certificate or key file that cannot be read."""
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        raise DeploymentError("needs a certificate", field="ssl_keyfile", hint="add --ssl-certfile")
    for field in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(settings, field)
        if path is None:
            continue
        try:
            path.open("rb").close()
        except OSError as error:
            raise DeploymentError(f"cannot read {path}: {error.strerror}", field=field) from None


def _load(config: uvicorn.Config) -> None:
    """Load the TLS certificate and private key that the server's config names.

    Raises:
        DeploymentError: the certificate or the key is invalid, or they do not belong together.
    """
    try:
        config.load()
    except ssl.SSLError as error:
        why = (error.reason or "no PEM").lower().replace("_", " ")
        raise DeploymentError(
            f"{config.ssl_certfile} and its key cannot be used: {why}", field="ssl_certfile",
            hint="give a certificate chain and the key of its first certificate, in PEM",
        ) from None  # fmt: skip


class Server(uvicorn.Server):
    """A uvicorn server without uvicorn's signal handlers.

    When it stops, it lets clients read the last event of responses that were cut off.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because the command's own handlers first drain the requests in flight."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down and wait up to 5 s for slow clients to read their last event.

        uvicorn's own shutdown cancels long responses and closes their connections at once. A slow client would
        then not get the error event that ends its response.
        """
        await super().shutdown(sockets)
        for _ in range(_LAST_EVENT_TURNS):
            if not self.server_state.connections:
                break
            await asyncio.sleep(0.05)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; called before the model loads, so that a port in use fails at once.

    Raises:
        DeploymentError: host or port cannot be used; the error names the one at fault.
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
        # 2048 is uvicorn's default backlog. From here on no other process can use the port.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise DeploymentError(
                f"{port} on {host} is in use", field="port", hint="stop the other server or use --port 0"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise DeploymentError(
                f"{host!r} is not an address of this machine", field="host", hint="try 127.0.0.1"
            ) from None
        raise DeploymentError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="port",
            hint="give another --port or --host",
        ) from None
    return sock


def accepting(sock: socket.socket) -> list[socket.socket]:
    """Return the listening socket and 31 duplicates of it, so that more connections are accepted at once.

    In one iteration of the event loop, uvloop (libuv 1.52, uv__server_io) accepts one connection per socket,
    while asyncio accepts all waiting ones. With one socket and 512 clients at once, a probe of /health waited
    512 iterations. The server closes all 32 sockets when it stops.
    """
    return [sock, *(sock.dup() for _ in range(ACCEPTED_A_ROUND - 1))]


class _Stop:
    """Handler that stops the server and records why: a signal, a failed start, or too many engine deaths."""

    def __init__(self, drain_seconds: float) -> None:
        self.server: uvicorn.Server | None = None
        self.state: ServerState | None = None
        self.error: TonnageError | None = None
        self.signal: int | None = None
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    def on_error(self, error: TonnageError) -> None:
        """Record the error as the cause of the stop, and stop the server."""
        self.error = error
        self._exit()

    def on_signal(self, number: int) -> None:
        """Drain the requests in flight at the first stop signal; stop at once at the second."""
        if self._draining is not None:
            assert self.state is not None
            if not self._draining.done():
                # an uncancelled drain would log that all requests have ended, although they are cut off
                self._draining.cancel()
                log.warning("second stop signal: %d requests are cut off", self.state.accounts.in_flight)
            self._exit()
            return
        self.signal = number
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        assert self.state is not None
        await self.state.drain(self._drain_seconds)
        self._exit()

    def _exit(self) -> None:
        if self.server is not None:
            self.server.should_exit = True


async def _serve(stop: _Stop, sock: socket.socket, state: ServerState, address: str) -> None:
    assert stop.server is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    watcher = asyncio.create_task(_announce(state, address))
    await stop.server.serve(sockets=accepting(sock))
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher


async def _announce(state: ServerState, address: str) -> None:
    with ProgressDisplay("loading the model") as tick:
        while not state.started and state.startup_error is None:
            tick()
            await asyncio.sleep(0.1)
    if state.started:
        settle_heap()
        print(f"ready on {address}", flush=True)
        await shrink_heap()


def _exit_code(stop: _Stop) -> int:
    # A signal decides the exit code even when there is an error: a signal while loading also sets an error.
    if stop.error is not None and stop.signal is None:
        print(f"tonnage: {stop.error}", file=sys.stderr)
        unexpected = type(stop.error) in (TonnageError, EngineDead)
        return FAILED if unexpected else BAD_INPUT
    return INTERRUPTED if stop.signal == signal.SIGINT else OK


def _url(sock: socket.socket, settings: Settings) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"
