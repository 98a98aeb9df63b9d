"""Connection of the web page to a hub model, with HTTP requests that the browser makes.

The page calls Python, which returns a list of the needed requests. The page makes them and calls Python again
with the responses, until config and headers are complete. Rules, limits and errors are the same as in
planner/headers/remote.py.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request
from urllib.response import addinfourl

from tonnage.planner.headers.index import MAX_INDEX_BYTES
from tonnage.planner.headers.names import HubModel
from tonnage.planner.headers.remote import Remote
from tonnage.planner.model.tensor import HeaderTensor
from tonnage.planner.source.hub import read
from tonnage.planner.source.resolve import ModelSource, keep


@dataclass(frozen=True, slots=True)
class BrowserResponse:
    """The browser's response to one HTTP request for a model file.

    Attributes:
        body: the content; for a range request only the range.
        failed: the browser's error message if no response came, else empty.
    """

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    failed: str = ""


class _Pending(Exception):
    """Signal that a required model file is missing until the browser has made an HTTP request for it."""


class _NoRange(Exception):
    """Signal that the server does not allow requests for the first bytes of a file."""


class BrowserRemote(Remote):
    """The connection to a hub model that requests files through the browser.

    Attributes:
        wanted: (address, Range header or "", maximum bytes) of each request to make next.
        note: the reason why only the model's config or index was read, but no checkpoint header; else empty.
    """

    def __init__(self, model: HubModel) -> None:
        super().__init__(model, self._answer)
        self.model = model
        self.wanted: list[tuple[str, str, int]] = []
        self.note = ""
        self._answers: dict[tuple[str, str], BrowserResponse] = {}
        self._headers: dict[str, tuple[HeaderTensor, ...]] = {}

    def advance(self, answers: list[BrowserResponse]) -> bool:
        """Process the browser's responses to the HTTP requests in `wanted`.

        Returns whether the model's config and headers are complete.

        Raises:
            TonnageError: the model cannot be fetched.
        """
        for (address, span, _), answer in zip(self.wanted, answers, strict=True):
            self._answers[address, span] = answer
        self.wanted = []
        try:
            config, found = read(self.model, self, headers=not self.note)
        except _Pending:
            return False
        except _NoRange as error:
            self.note = str(error)
            return self.advance([])
        name = str(self.model)
        keep(ModelSource(name, name, config, "hub", found.tensors, found.index))
        if self.note:
            instead = "config.json alone" if found.index is None else "the index"
            self.note = f"{self.note}: planned from {instead}, the command reads the files' headers"
        return True

    def headers(self, names: list[str]) -> list[tuple[HeaderTensor, ...]]:
        """Return the tensors in the headers of safetensors files; request all missing headers at once."""
        for name in names:
            if name not in self._headers:
                try:
                    self._headers[name] = self.header(name)
                except _Pending:
                    continue  # All missing headers are requested at once.
        if self.wanted:
            raise _Pending
        return [self._headers[name] for name in names]

    def _answer(self, request: Request, timeout: float) -> Any:
        span = request.get_header("Range") or ""
        answer = self._answers.get((request.full_url, span))
        if answer is None:
            first, _, last = span.removeprefix("bytes=").partition("-")
            most = int(last) - int(first) + 1 if span else MAX_INDEX_BYTES
            self.wanted.append((request.full_url, span, most + 1))
            raise _Pending
        if answer.failed and span:
            raise _NoRange(f"the browser cannot read the first bytes of the model's files ({answer.failed})")
        if answer.failed:
            raise URLError(answer.failed)
        headers = Message()
        for name, value in answer.headers:
            headers[name] = value
        body = io.BytesIO(answer.body)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise HTTPError(request.full_url, answer.status, "", headers, body)
        if span and (answer.status != HTTPStatus.PARTIAL_CONTENT or "Content-Range" not in headers):
            raise _NoRange("the server's response does not state which part of the file it has")
        return addinfourl(body, headers, request.full_url, answer.status)
