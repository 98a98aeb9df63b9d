"""Two servers on loopback: one responds like the hub, the other is the storage of its large files.

Responses have the form that huggingface_hub 1.x reads (utils/_http.py). An unknown model is 401 without a token
and 404 with one; X-Error-Code names the reason. Small files are redirected within the hub, large ones to the
storage. Both send CORS headers as the hub and cas-bridge.xethub.hf.co do
(github.com/huggingface/datasets/issues/7931); neither supports OPTIONS.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

TOKEN = "hf_" + "s3cret" * 5
NO_ACCESS = "hf_" + "0utside" * 4  # valid, of an account that no gated model lets in


@dataclass
class Hub:
    """``files``: by (repo, revision) and name. ``failing``: repo -> (status, headers) of every answer."""

    url: str = ""
    storage: str = ""
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)  # file -> where it is redirected
    failing: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # (path, Authorization)
    asked_of_storage: list[tuple[str, str | None]] = field(default_factory=list)
    cookies: list[str | None] = field(default_factory=list)  # of both
    referrers: list[str | None] = field(default_factory=list)  # of both
    ranges: bool = True  # whether the storage answers them
    readable: bool = True  # whether a page of another host may read what the storage sends


class FileAnswers(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def send(self, data: bytes, ranges: bool = True) -> int:
        """Send the file, or its requested byte range; return the number of bytes sent.

        ``ranges=False`` ignores the Range header, as some hosts do.
        """
        span = self.headers.get("Range")
        if span and ranges:
            first, last = (int(part) for part in span.removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        else:
            part = data
            self.send_response(200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        return len(part)


class _Answers(FileAnswers):
    hub: Hub
    exposed = ""

    def end_headers(self) -> None:
        if self.exposed:
            self.send_header("Access-Control-Allow-Origin", "*")
            self.send_header("Access-Control-Expose-Headers", self.exposed)
        super().end_headers()

    def noted(self, asked: list[tuple[str, str | None]]) -> None:
        asked.append((self.path, self.headers.get("Authorization")))
        self.hub.cookies.append(self.headers.get("Cookie"))
        self.hub.referrers.append(self.headers.get("Referer"))

    def refuse(self, status: int, headers: dict[str, str] | None = None) -> None:
        # a proxy may repeat what it was sent
        self.send_response(status, f"said {self.headers.get('Authorization')}")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(str(self.headers).encode())

    def redirect(self, to: str) -> None:
        self.send_response(307)
        self.send_header("Location", to)
        self.end_headers()

    def found(self, repo: str, revision: str, name: str) -> bytes | None:
        """Return a file's content; without access or file, send an error and return None."""
        hub, shown = self.hub, (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo in hub.failing:
            self.refuse(*hub.failing[repo])
        elif shown not in ("", TOKEN, NO_ACCESS):
            self.refuse(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif all(repo != known for known, _ in hub.files):
            self.refuse(404 if shown else 401, {"X-Error-Code": "RepoNotFound"})
        elif repo in hub.gated and shown != TOKEN:
            self.refuse(403 if shown else 401, {"X-Error-Code": "GatedRepo"})
        elif (repo, revision) not in hub.files:
            self.refuse(404, {"X-Error-Code": "RevisionNotFound"})
        elif name not in hub.files[repo, revision]:
            self.refuse(404, {"X-Error-Code": "EntryNotFound"})
        else:
            return hub.files[repo, revision][name]
        return None


class _HubAnswers(_Answers):
    exposed = "X-Error-Code, X-Error-Message, Content-Range, ETag"

    def do_GET(self) -> None:
        hub = self.hub
        self.noted(hub.asked)
        if self.path.startswith("/api/resolve-cache/models/"):
            org, name, revision, file = self.path.partition("?")[0].split("/")[4:]
            if (data := self.found(f"{org}/{name}", unquote(revision), file)) is not None:
                self.send(data)
            return
        org, name, _, revision, file = self.path.removeprefix("/models").split("/")[1:]  # ModelScope's
        repo = f"{org}/{name}"
        if repo in hub.renamed:
            self.redirect(f"/{hub.renamed[repo]}/resolve/{revision}/{file}")
        elif (data := self.found(repo, unquote(revision), file)) is None:
            pass
        elif file in hub.elsewhere:
            self.redirect(hub.elsewhere[file])
        elif file.endswith(".safetensors"):
            self.redirect(f"{hub.storage}/{repo}/{revision}/{file}?signed=yes")
        else:
            self.redirect(f"/api/resolve-cache/models/{repo}/{revision}/{file}")


class _StorageAnswers(_Answers):
    @property
    def exposed(self) -> str:
        return "Accept-Ranges, Content-Range, ETag" if self.hub.readable else ""

    def do_GET(self) -> None:
        self.noted(self.hub.asked_of_storage)
        org, name, revision, file = self.path.partition("?")[0].split("/")[1:]
        self.send(self.hub.files[f"{org}/{name}", unquote(revision)][file], self.hub.ranges)


@contextmanager
def hub_server(tls: ssl.SSLContext | None = None) -> Iterator[Hub]:
    """Yield a hub at 127.0.0.1 with its storage on another host, localhost; ``tls`` serves both by HTTPS."""
    hub = Hub()
    kinds = [type(kind.__name__, (kind,), {"hub": hub}) for kind in (_HubAnswers, _StorageAnswers)]
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in kinds]
    for server in servers if tls else []:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    hub.url, hub.storage = (
        f"http{'s' if tls else ''}://{host}:{server.server_port}"
        for host, server in zip(("127.0.0.1", "localhost"), servers, strict=True)
    )
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
