"""The command `tonnage page`, which serves the web page locally or writes its files."""

from __future__ import annotations

import socket
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tonnage.planner.arguments import Parser, refused
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.page.build import build
from tonnage.planner.units import parse_port

_HOST, _PORT = "127.0.0.1", 8300
_EPILOG = """
examples:
  tonnage page                     http://127.0.0.1:8300, until Ctrl-C
  tonnage page --build ./public    files for any web host
"""


def parser() -> Parser:
    """Return the argument parser of the command `tonnage page`."""
    p = Parser(
        "tonnage page", "Run tonnage plan and train on a page in the browser; no data leaves it.", _EPILOG
    )
    p.add_argument("--host", help=f"address to listen on (default: {_HOST})")
    p.add_argument("--port", metavar="N", help=f"0 takes a free port (default: {_PORT})")
    p.add_argument("--build", metavar="FOLDER", help="write the files to FOLDER and exit")
    p.add_argument(
        "--pyodide", metavar="FOLDER", help="Pyodide's files (default: shipped, else fetched once by npm)"
    )
    return p


class _Handler(SimpleHTTPRequestHandler):
    timeout = 60.0  # seconds after which an idle connection is closed
    extensions_map = {  # noqa: RUF012 the base class's
        **SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm",
    }  # fmt: skip

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    """An HTTP server with threads that listens on an IPv4 or IPv6 address."""

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family, *_ = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        super().__init__(address, handler)


def server(folder: Path, host: str, port: int) -> ThreadingHTTPServer:
    """Return an HTTP server, not started yet, for the files of the web page in `folder`.

    Raises:
        DeploymentError: the address or port cannot be used.
    """
    try:
        return _Server((host, port), partial(_Handler, directory=str(folder)))
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise DeploymentError(
            f"cannot listen on {host} port {port}: {words}", field="--port", hint="--port 0 takes a free one"
        ) from None


def run(argv: list[str]) -> int:
    """Run `tonnage page` and return its exit code.

    Args:
        argv: the words after the sub-command's name.
    """
    try:
        args = parser().parse_args(argv)
        if args.build is not None:
            for name in ("host", "port"):
                if getattr(args, name) is not None:
                    raise DeploymentError("--build writes files and starts no server", field=f"--{name}",
                                          hint=f"leave out --build or --{name}")  # fmt: skip
            build(Path(args.build), args.pyodide, kept=True)
            print(f"Written into {args.build}: index.html and what it loads, to be served over HTTP")
            return 0
        port = _PORT if args.port is None else parse_port(args.port)
        with tempfile.TemporaryDirectory() as place:
            build(Path(place) / "page", args.pyodide)
            host = _HOST if args.host is None else args.host
            with server(Path(place) / "page", host, port) as serving:
                shown = f"[{host}]" if ":" in host else host
                print(f"http://{shown}:{serving.server_address[1]} (Ctrl-C ends it)", flush=True)
                serving.serve_forever()
        return 0
    except SystemExit as stop:  # argparse exits after --help.
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 0
    except TonnageError as error:
        return refused(error)
