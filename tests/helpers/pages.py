"""A server of stored answers: what a path is answered with can be changed while it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECORDED = Path(__file__).resolve().parent.parent / "data" / "metrics_pages"


@dataclass
class Stored:
    """``status`` 0: the connection is closed without a word."""

    body: str | bytes = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Pages:
    """``paths``: answers by path without its query; others are 404. ``asked``: (path, headers) so far."""

    url: str
    paths: dict[str, Stored]
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)


@contextmanager
def pages(**paths: str | bytes | Stored) -> Iterator[Pages]:
    """``pages(metrics=..., v1_models=...)``: ``_`` in a name stands for ``/`` after v1, else for itself."""
    stored = {
        "/" + name.replace("v1_", "v1/"): page if isinstance(page, Stored) else Stored(page)
        for name, page in paths.items()
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            served.asked.append((self.path, dict(self.headers)))
            answer = served.paths.get(path, Stored('{"detail":"Not Found"}', 404))
            if answer.status == 0:
                self.close_connection = True
                return
            body = answer.body.encode() if isinstance(answer.body, str) else answer.body
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client disconnected
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Pages(f"http://127.0.0.1:{server.server_address[1]}", stored)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def recorded(folder: str, name: str) -> str:
    return (RECORDED / folder / name).read_text()
