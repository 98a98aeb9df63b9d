"""ASGI middleware for the paths of Anthropic's API: errors in its form, and its header ``request-id``."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tonnage.server.errors import anthropic_error

PATH = "/v1/messages"


class AnthropicForm:
    """ASGI middleware that converts error responses of Anthropic's API from OpenAI's form to Anthropic's.

    Errors arise in many places, such as authentication and limits of the body. All of them are small JSON
    bodies, which are converted here. Other responses, and paths that do not begin with ``PATH``, pass through.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app; convert its response when it is an error of Anthropic's API."""
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self._app(scope, receive, send)
            return
        start: Message = {}
        body = b""

        async def convert(message: Message) -> None:
            nonlocal start, body
            request_id = scope["tonnage.request_id"]
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"request-id", request_id.encode("latin-1"))]
                if message["status"] >= 400:
                    start = message
                    return
            elif start and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if message.get("more_body"):
                    return
                body = _converted(body, request_id)
                start["headers"] = [
                    (name, str(len(body)).encode() if name == b"content-length" else value)
                    for name, value in start["headers"]
                ]
                await send(start)
                start = {}
                message = {"type": "http.response.body", "body": body, "more_body": False}
            await send(message)

        await self._app(scope, receive, convert)


def _converted(body: bytes, request_id: str) -> bytes:
    try:
        error: Any = json.loads(body)["error"]
        return json.dumps(anthropic_error(error["code"], error["message"], error["param"], request_id)).encode()
    except (ValueError, KeyError, TypeError):
        return body  # the body is no error object, for example after the client disconnected
