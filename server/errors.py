"""Errors of the API: a closed set of codes, and the single place that turns them into HTTP responses.

Every error response goes through ``render``, which writes OpenAI's error object, the status and the retry
headers. A request that can never succeed gets 400 and ``x-should-retry: false``. A request that may succeed
later gets 429 or 503 and ``Retry-After``. The OpenAI SDK reads these headers.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tonnage.planner.errors import TonnageError
from tonnage.server.engines.errors import QueueFull

log = logging.getLogger("tonnage.server")

# The limit of an error message in characters, so that a large request body cannot cause a large error.
MAX_MESSAGE = 1000


class ErrorCode(StrEnum):
    """Every value of ``error.code`` in the API's error responses, with its HTTP status (400 unless given).

    ``retryable`` says whether the client may retry; the response then has the header Retry-After.
    """

    status: int
    retryable: bool

    def __new__(cls, value: str, status: int = 400, retryable: bool = False) -> ErrorCode:
        """Return the code with the text ``value``, the HTTP status ``status`` and the flag ``retryable``."""
        code = str.__new__(cls, value)
        code._value_, code.status, code.retryable = value, status, retryable
        return code

    MALFORMED_HTTP = "malformed_http_request"
    INVALID_JSON = "invalid_json"
    INVALID_ENCODING = "invalid_encoding"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type", 415
    REQUEST_TOO_LARGE = "request_too_large", 413
    MISSING_PARAMETER = "missing_required_parameter"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    MODEL_NOT_FOUND = "model_not_found", 404
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    EXCEEDS_KV_CAPACITY = "exceeds_kv_capacity"
    INVALID_API_KEY = "invalid_api_key", 401
    PERMISSION_DENIED = "permission_denied", 403
    # Status 429 means that the client has used up its own quota, while other clients are still served.
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded", 429, True
    INSUFFICIENT_QUOTA = "insufficient_quota", 429
    UNSUPPORTED_ENDPOINT = "unsupported_endpoint"
    HEADERS_TOO_LARGE = "headers_too_large", 431
    REQUEST_TIMEOUT = "request_timeout", 408
    QUEUE_TIMEOUT = "queue_timeout", 503, True
    UNKNOWN_URL = "unknown_url", 404
    METHOD_NOT_ALLOWED = "method_not_allowed", 405
    # Status 503, not 429: the server can serve no client now, so a load balancer should try another server.
    SERVER_OVERLOADED = "server_overloaded", 503, True
    MODEL_LOADING = "model_loading", 503, True
    ENGINE_DEAD = "engine_dead", 503, True
    SERVER_STOPPING = "server_stopping", 503, True
    INTERNAL_ERROR = "internal_error", 500

    @property
    def type(self) -> str:
        """OpenAI's type of the error, which follows from the HTTP status."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class ApiError(Exception):
    """An error that the API reports to the client.

    ``param`` is the field of the request body that caused the error.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float = 1.0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def status(self) -> int:
        """HTTP status of the error's code."""
        return self.code.status

    @property
    def is_refusal(self) -> bool:
        """Whether the server rejected the request (bad input, too large, overloaded); False after a failure."""
        return self.status < 500 or self.code in (
            ErrorCode.SERVER_OVERLOADED,
            ErrorCode.MODEL_LOADING,
            ErrorCode.QUEUE_TIMEOUT,
        )

    @property
    def is_timeout(self) -> bool:
        """Whether the server stopped a running request because its time limit was over."""
        return self.code is ErrorCode.REQUEST_TIMEOUT


class ErrorBody(BaseModel):
    """OpenAI's error object: the value of ``error`` in an error response."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """Body of every error response, as declared in the OpenAPI document."""

    error: ErrorBody


RESPONSES: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}}


def invalid_value(message: str, param: str | None) -> ApiError:
    """Return the error (invalid_value) for a value that the field ``param`` of a request body must not have."""
    return ApiError(ErrorCode.INVALID_VALUE, message, param=param)


def unsupported_parameter(message: str, param: str | None) -> ApiError:
    """Return the error (unsupported_parameter) for a field that the model or engine cannot honour."""
    return ApiError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=param)


def stopping() -> ApiError:
    """Return the error (server_stopping) for a request that is cut off because the server stops."""
    return ApiError(ErrorCode.SERVER_STOPPING, "the server is stopping", retry_after_seconds=5)


def envelope(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's JSON object for ``error``; its code is a string, and its param a string or null."""
    message = error.message if len(error.message) <= MAX_MESSAGE else error.message[: MAX_MESSAGE - 3] + "..."
    return {
        "error": {
            "message": message,
            "type": error.code.type,
            "param": error.param,
            "code": error.code.value,
        }
    }


class AnthropicErrorBody(BaseModel):
    """Anthropic's error object: the value of ``error`` in an error response of /v1/messages."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorResponse(BaseModel):
    """Body of every error response of /v1/messages, as declared in the OpenAPI document."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


ANTHROPIC_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicErrorResponse},
    "5XX": {"model": AnthropicErrorResponse},
}

# Anthropic's types of errors by HTTP status; other rejections are of the type invalid_request_error.
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def anthropic_envelope(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's JSON object for ``error``, which is the body of a response or the data of an event."""
    body = envelope(error)["error"]
    return anthropic_error(body["code"], body["message"], body["param"], request_id)


def anthropic_error(code: str, message: str, param: str | None, request_id: str) -> dict[str, Any]:
    """Return Anthropic's JSON object for an error with this code and message about the field ``param``."""
    if code == ErrorCode.CONTEXT_LENGTH_EXCEEDED:
        # Clients search an error message for "prompt is too long", and shorten the conversation if it is there.
        message = f"prompt is too long: {message}"
    kind = _ANTHROPIC_TYPES.get(ErrorCode(code).status, "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if param == "thread":
        # A request may name a conversation that the server stores (a thread), but this server stores none.
        # After an error with the code thread_unsupported_request, the anthropic package sends the whole
        # conversation instead (2.14, lib/threads/_thread_state.py).
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}


def headers(error: ApiError) -> dict[str, str]:
    """Return the response headers that tell a client whether and when to retry after ``error``.

    Returns:
        ``Retry-After`` (seconds) and ``retry-after-ms`` when a retry may succeed, and ``x-should-retry: false``
            when it cannot. An internal error has no such header, because its cause is unknown.
    """
    code = error.code
    if code.retryable:
        seconds = max(0.001, error.retry_after_seconds)
        return {
            "retry-after": str(math.ceil(seconds)),
            "retry-after-ms": str(math.ceil(seconds * 1000)),
            "x-should-retry": "true",
        }
    if code.status == 401:
        return {"www-authenticate": "Bearer", "x-should-retry": "false"}
    return {"x-should-retry": "false"} if code.status < 500 else {}


def render(error: ApiError, extra: dict[str, str] | None = None) -> Response:
    """Return the HTTP response for ``error``, with the headers ``extra`` added."""
    return JSONResponse(envelope(error), status_code=error.status, headers=headers(error) | (extra or {}))


_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.@+ -]+/)+[\w.@+-]*")


def from_exception(error: Exception) -> ApiError:
    """Convert an exception to the error that a client may see.

    A TonnageError whose code is an ErrorCode keeps it; any other exception becomes ``internal_error``. File
    paths are removed from messages, because they describe the operator's disk and not the client's input.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TonnageError) and error.code in set(ErrorCode):
        message = error.message + (f" ({error.hint})" if error.hint else "")
        return ApiError(
            ErrorCode(error.code),
            _PATH.sub("<path>", message),
            param=error.field,
            retry_after_seconds=error.retry_after_seconds if isinstance(error, QueueFull) else 1.0,
        )
    log.error("unexpected error while serving a request", exc_info=error)
    return ApiError(ErrorCode.INTERNAL_ERROR, "the server met an unexpected error; its log has the details")


def install(app: FastAPI, report: Callable[[ApiError, str, str], None]) -> None:
    """Register exception handlers that answer every error of ``app`` in OpenAI's format.

    Args:
        app: The application.
        report: A function that is called for each error with the error, the request's path and the request id.
    """

    def answer(request: Request, error: ApiError, extra: dict[str, str] | None = None) -> Response:
        report(error, request.scope["path"], request.scope.get("tonnage.request_id", ""))
        return render(error, extra)

    async def on_error(request: Request, error: Exception) -> Response:
        return answer(request, from_exception(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path[:200]}"
        if error.status_code == 404:
            return answer(request, ApiError(ErrorCode.UNKNOWN_URL, f"unknown URL: {where}"))
        if error.status_code == 405:
            allow = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow") or ""
            text = f"method not allowed: {where}" + (f"; use {allow}" if allow else "")
            return answer(
                request, ApiError(ErrorCode.METHOD_NOT_ALLOWED, text), {"allow": allow} if allow else None
            )
        if error.status_code < 500:
            return answer(request, ApiError(ErrorCode.INVALID_VALUE, str(error.detail)))
        return answer(request, ApiError(ErrorCode.INTERNAL_ERROR, str(error.detail)))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = str(first["loc"][-1]) if first["loc"] else None
        return answer(request, ApiError(ErrorCode.INVALID_VALUE, str(first["msg"]), param=param))

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(TonnageError, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_error)
