"""Model files over HTTP by range request: config, index and safetensors headers, never weights.

Every read has a size limit. A server that answers a range request with the whole file is an error. A redirect
to another host is an error too, except to the hub's own storage. The token is sent to the hub only, never to
the target of a redirect. Error messages contain no text of the server's response, because the response may
repeat the request and its token.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage, InvalidURL, responses
from typing import IO, Any
from urllib.parse import quote, urlsplit

from tonnage.planner.errors import CheckpointError, HubUnreachable, ModelNotFound
from tonnage.planner.headers.config_files import add_config_files
from tonnage.planner.headers.hub import endpoint, modelscope, token, tokens_page
from tonnage.planner.headers.index import (
    INDEX,
    MAX_INDEX_BYTES,
    Checkpoint,
    merge_shards,
    parse_index,
    shards_of,
)
from tonnage.planner.headers.names import HubModel, revision_of
from tonnage.planner.headers.safetensors import MAX_HEADER_BYTES, parse_header
from tonnage.planner.model.fields import MAX_CONFIG_BYTES, parse_config
from tonnage.planner.model.tensor import HeaderTensor

_TIMEOUT_SECONDS = 10.0  # The timeout applies to one HTTP response.

# Bytes that the first request for a safetensors header reads. Most headers are shorter; a longer one takes a
# second request.
_FIRST_BYTES = 1 << 16
# Maximum number of shards whose headers are fetched, with two requests each. A model with more shards is
# planned from config.json and the index.
_MAX_SHARDS = 64
_THREADS = 8
# Hosts to which huggingface.co, its mirrors and ModelScope redirect requests for large files (LFS, Xet storage)
_HUB_STORAGE = (".huggingface.co", ".hf.co", ".modelscope.cn", ".modelscope.ai")


_CREDENTIALS = frozenset(("Authorization", "Cookie"))


class _SameHost(urllib.request.HTTPRedirectHandler):
    """A urllib handler that follows redirects on the same host and, without the token, to hub storage."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Return the request that follows a redirect.

        Raises:
            CheckpointError: the redirect leads to another host, which is not hub storage.
        """
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        same = (new.scheme, new.hostname, new.port) == (old.scheme, old.hostname, old.port)
        # A redirect from HTTP to HTTPS on the same host is allowed.
        if (old.scheme, old.port, new.scheme, new.port) == ("http", None, "https", None):
            same = new.hostname == old.hostname
        stored = new.scheme in ("https", old.scheme) and ("." + (new.hostname or "")).endswith(_HUB_STORAGE)
        if not same and not stored:
            raise CheckpointError(
                f"is redirected from {old.hostname} to another host, {new.hostname}", field=old.path[-80:]
            )
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if same and following is not None:  # a redirect on the same host, for example for a renamed model
            for name in _CREDENTIALS & req.unredirected_hdrs.keys():
                following.add_unredirected_header(name, req.unredirected_hdrs[name])
        return following


@contextmanager
def _as_model_not_found(name: str) -> Iterator[None]:
    """Convert connection errors to ModelNotFound; an HTTPError, which is a response, passes unchanged."""
    try:
        yield
    except urllib.error.HTTPError:
        raise
    except (OSError, ValueError, HTTPException) as error:
        kind: type[ModelNotFound] = HubUnreachable
        if isinstance(error, InvalidURL | ValueError):
            kind = ModelNotFound
        if isinstance(error, InvalidURL):
            why = "its address is not valid"
        elif isinstance(error, HTTPException):  # the text of an HTTPException may quote the server's answer
            why = f"the server's answer is not HTTP, or broke off ({type(error).__name__})"
        else:
            reason = getattr(error, "reason", error)  # `strerror` leaves out the error number
            why = str(getattr(reason, "strerror", None) or reason)[:200]
        hint = "HF_ENDPOINT names a mirror; a local folder with config.json needs no hub"
        raise kind(f"cannot be fetched from {endpoint()[:80]}: {why}", field=name, hint=hint) from None


class Remote:
    """The files of one model on the hub, read over HTTP at `<endpoint>/<repo>/resolve/<revision>/`."""

    def __init__(self, model: HubModel, open: Callable[..., Any] | None = None) -> None:
        """Prepare HTTP requests for a model's files on the hub.

        Args:
            model: the model.
            open: function that sends a request and returns the response, like the `open` of a urllib opener;
                the planner in a browser passes its own.

        Raises:
            ModelNotFound: the hub token is invalid.
        """
        self._model, self._page = model, f"{endpoint()}/{quote(model.repo)}"
        self._base = f"{self._page}/resolve/{quote(revision_of(model), safe='')}/"
        self._token = token()
        self._open = open or urllib.request.build_opener(_SameHost).open

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small file of the model, or None if it does not exist.

        Raises:
            CheckpointError: the file has more than `limit` bytes.
        """
        answer = self._get(name, None)
        if answer is None:
            return None
        with answer, _as_model_not_found(name):
            stated = _bytes(answer.headers.get("Content-Length"))
            if stated is not None and stated > limit:
                raise CheckpointError(f"has {stated:,} bytes; at most {limit:,} are read", field=name)
            data: bytes = answer.read(limit + 1)
        if len(data) > limit:
            raise CheckpointError(f"has more than {limit:,} bytes", field=name)
        return data

    def first_bytes(self, name: str, count: int) -> tuple[bytes, int]:
        """Return the first bytes, at most `count`, of a file of the model, and the whole file's size."""
        return self._range(name, 0, count)

    def files(self) -> list[str]:
        """Return the paths of the files in the model's repository, from the hub API behind list_repo_tree."""
        address = f"{endpoint()}/api/models/{quote(self._model.repo)}/tree/"
        address += f"{quote(revision_of(self._model), safe='')}?recursive=true"
        answer = self._get("tree", None, address)
        if answer is None:
            return []
        with answer, _as_model_not_found("tree"):
            data: bytes = answer.read(MAX_INDEX_BYTES)
        try:
            entries = json.loads(data)
        except (ValueError, RecursionError):
            entries = None
        if not isinstance(entries, list):
            raise CheckpointError("the hub's list of files is not a JSON list", field=self._model.repo)
        found = [entry.get("path") for entry in entries if isinstance(entry, dict)]
        return [path for path in found if isinstance(path, str)]

    def header(self, name: str) -> tuple[HeaderTensor, ...]:
        """Return the header entries of a safetensors file's tensors, read from its first bytes."""
        data, size = self._range(name, 0, _FIRST_BYTES)
        if len(data) < 8:
            raise CheckpointError(f"{size} bytes are too short for a safetensors header", field=name)
        length = int.from_bytes(data[:8], "little")
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"claims a header of {length:,} bytes; the file has {size:,}, and {MAX_HEADER_BYTES:,} are "
                "read at most",
                field=name,
            )
        if 8 + length > len(data):
            rest, _ = self._range(name, len(data), 8 + length - len(data))
            data += rest
        return parse_header(data[8 : 8 + length], size - 8 - length, name)

    def headers(self, names: list[str]) -> list[tuple[HeaderTensor, ...]]:
        """Return the header entries of several safetensors files' tensors, fetched in parallel."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self.header, names))

    def _range(self, name: str, start: int, count: int) -> tuple[bytes, int]:
        """Return `count` bytes of a file of the model from byte `start` on, and the whole file's size."""
        answer = self._get(name, f"bytes={start}-{start + count - 1}")
        if answer is None:
            raise CheckpointError("is missing", field=name)
        with answer, _as_model_not_found(name):
            if answer.status != 206:
                raise CheckpointError(
                    "the server does not support range requests, so the file's header cannot be read alone",
                    field=name,
                )
            total = _bytes((answer.headers.get("Content-Range") or "").rpartition("/")[2])
            data: bytes = answer.read(count + 1)
        if total is None or len(data) > count:
            raise CheckpointError("the server did not send the requested range of bytes", field=name)
        return data, total

    def _get(self, name: str, span: str | None, address: str | None = None) -> Any:
        """Return the response to a request for a file of the model, or None if the file does not exist.

        The request goes to `address` if it is given, else to the file's own address.
        """
        address = self._base + quote(name) if address is None else address
        try:
            with _as_model_not_found(name):
                request = urllib.request.Request(address, headers={"User-Agent": "tonnage"})
                if self._token is not None:
                    request.add_unredirected_header("Authorization", f"Bearer {self._token}")
                    if modelscope():  # ModelScope accepts the token in the header or in a cookie
                        request.add_unredirected_header("Cookie", f"m_session_id={self._token}")
                if span is not None:
                    request.add_header("Range", span)
                return self._open(request, timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                # The hub sends X-Error-Code with a 404; a plain file server does not.
                if error.code == 404 and error.headers.get("X-Error-Code") in (None, "EntryNotFound"):
                    return None
                why, hint = self._refused(error.code, error.headers)
            raise ModelNotFound(why, field=name, hint=hint) from None

    def _refused(self, code: int, headers: Message) -> tuple[str, str]:
        """Return an error message and a hint for an HTTP error that the hub returned.

        The hub uses the error codes that hf_raise_for_status of huggingface_hub 1.x defines (utils/_http.py).
        """
        kind, sent = headers.get("X-Error-Code"), self._token is not None
        said = f"the hub answers {code} {responses.get(code, '')}".rstrip()
        login = "log in with 'hf auth login', or set HF_TOKEN or --hf-token"
        if modelscope():
            login = "set MODELSCOPE_API_TOKEN"
        own = f"a token of your own from {tokens_page()}"
        if kind == "RevisionNotFound":
            return (
                f"{said}: it has no revision {self._model.revision}",
                f"{self._page} lists its branches and tags",
            )
        if code == 404:
            return f"{said}: there is no such model, or it is private to others", f"look for it on {endpoint()}"
        if kind == "GatedRepo" or code == 403:
            if sent:
                licence = f"accept its licence at {self._page} with the account of the token"
                return f"{said}: gated, and this account has no access", (
                    f"{licence}; a fine-grained token has to allow reading gated repositories"
                )
            return f"{said}: gated, and no token was sent", f"accept its licence at {self._page}, then {login}"
        if code == 401:
            if sent:
                return f"{said}: the token is not valid, or the model is private to others", f"take {own}"
            return f"{said}: no such model, or private or gated and no token was sent", (
                f"check the name; else accept a licence at {self._page} and {login}"
            )
        if code == 429:
            wait = _seconds(headers.get("Retry-After"))
            more = "" if sent else f"; {own} allows more requests"
            return f"{said}: too many requests", f"try again {f'in {wait} s' if wait else 'later'}{more}"
        if code >= 500:
            return f"{said}: the hub or a proxy in front of it has an error", (
                "try again later; a local folder with config.json needs no hub"
            )
        return said, f"look at {self._page}"


def _bytes(header: str | None) -> int | None:
    """Return the number of bytes that an HTTP header such as Content-Length states, or None without one."""
    if header is None or not (header.isascii() and header.isdecimal() and len(header) < 20):
        return None
    return int(header)


def _seconds(retry_after: str | None) -> int | None:
    """Return the seconds to wait by a Retry-After header (RFC 9110, 10.2.3), or None if it is invalid.

    The header is a number of seconds or a date.
    """
    if retry_after is None:
        return None
    if retry_after.isdecimal() and retry_after.isascii():
        return int(retry_after[:9])
    try:
        until = parsedate_to_datetime(retry_after)
    except (ValueError, TypeError):
        return None
    return max(1, round(until.timestamp() - time.time()))


def fetch_config(remote: Remote) -> dict[str, Any] | None:
    """Fetch config.json; add the contents of hf_quant_config.json (ModelOpt) and of the processor's files.

    Returns None if the model has no config.json.
    """
    data = remote.read("config.json", MAX_CONFIG_BYTES)
    if data is None:
        return None
    config = parse_config(data, "config.json")

    def read(name: str) -> dict[str, Any] | None:
        content = remote.read(name, MAX_CONFIG_BYTES)
        return parse_config(content, name) if content else None

    add_config_files(config, read)
    return config


def fetch_checkpoint(remote: Remote, *, headers: bool = True) -> Checkpoint:
    """Fetch the safetensors headers of a hub model's `model.safetensors` or of all its shards.

    Returns the index alone if there are too many shards or `headers` is False.
    """
    text = remote.read(INDEX, MAX_INDEX_BYTES)
    if text is None:
        try:
            return Checkpoint(remote.header("model.safetensors") if headers else None)
        except CheckpointError as error:
            if error.message == "is missing":
                return Checkpoint()
            raise
    index = parse_index(text)
    shards = shards_of(index)
    if len(shards) > _MAX_SHARDS or not headers:
        return Checkpoint(index=index)
    return Checkpoint(merge_shards(dict(zip(shards, remote.headers(shards), strict=True)), index))
