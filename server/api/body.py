"""From the bytes of a request to a strict protocol model, or a refusal that names the field.

Read by hand instead of by FastAPI: the size is bounded while reading, and broken UTF-8, broken JSON and wrong
fields all end in the same small OpenAI error, never in a copy of the input.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from tonnage.server.disconnect import ClientDisconnected
from tonnage.server.errors import ApiError, ErrorCode

Model = TypeVar("Model", bound=BaseModel)

# A body over the limit is read to its end and thrown away up to this many times the limit: a client that is
# still sending does not read the answer.
_DISCARD_FACTOR = 8

_short = reprlib.Repr()  # an answer never grows with the body that caused it
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 3
_short.maxlevel = 2
_repr = _short.repr


@dataclass(frozen=True, slots=True)
class Fields:
    """A protocol model with what the API knows about fields it does not honour.

    ``unsupported`` maps a field to the values that ask for nothing (null always does); ``expected`` says
    what a field of several types takes.
    """

    model: type[BaseModel]
    unsupported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    unsupported_inside: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most ``limit`` bytes. Raises ApiError (wrong media type, too large), ClientDisconnected."""
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise ApiError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            f"content type {_repr(media)} is not supported; send application/json",
        )
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
        if not message.get("more_body") or size > _DISCARD_FACTOR * limit:
            break
    if size > limit:
        raise ApiError(
            ErrorCode.REQUEST_TOO_LARGE, f"the request body is larger than the limit of {limit} bytes"
        )
    return b"".join(parts)


def parse_body(body: bytes, fields: Fields) -> Any:
    """A validated instance of ``fields.model``. Raises ApiError naming the field and what is right."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(
            ErrorCode.INVALID_ENCODING,
            f"the request body is not UTF-8 (byte {error.start} is 0x{body[error.start]:02x})",
        ) from None
    try:
        document = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(ErrorCode.INVALID_JSON, f"the request body is not JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise ApiError(
            ErrorCode.INVALID_TYPE, f"the request body must be a JSON object, not {_json_type(document)}"
        )
    _drop_unsupported(document, fields.unsupported, "")
    for name, inside in fields.unsupported_inside.items():
        if isinstance(document.get(name), dict):
            _drop_unsupported(document[name], inside, f"{name}.")
    try:
        return fields.model.model_validate(document)
    except ValidationError as error:
        raise _refusal(error, document, fields) from None


def _drop_unsupported(
    document: dict[str, Any], unsupported: Mapping[str, tuple[Any, ...]], prefix: str
) -> None:
    for name, neutral in unsupported.items():
        if name not in document:
            continue
        value = document.pop(name)
        # bool is an int in Python: 0 and False, 1 and True must not pass for each other
        if value is None or any(
            value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in neutral
        ):
            continue
        hint = f"; leave it out or send {_repr(neutral[0])}" if neutral else "; leave it out"
        raise ApiError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            f"{prefix}{name} is not supported by this server (got {_repr(value)}){hint}",
            param=f"{prefix}{name}",
        )


def _refusal(error: ValidationError, document: dict[str, Any], fields: Fields) -> ApiError:
    """The first error of pydantic in one sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    kind, location = first["type"], first["loc"]
    name = str(location[0])
    if kind == "missing":
        param = ".".join(map(str, location))
        return ApiError(ErrorCode.MISSING_PARAMETER, f"you must provide {param}", param=param)
    if kind == "extra_forbidden":
        param = ".".join(str(part)[:60] for part in location)
        return ApiError(ErrorCode.UNKNOWN_PARAMETER, f"unknown field: {param}", param=param)
    value = document.get(name)
    if name in fields.expected:
        # A union: pydantic lists one error for each member, so say what the field takes as a whole.
        message = f"{name} must be {fields.expected[name]}, not empty; got {_repr(value)}"
        return ApiError(ErrorCode.INVALID_VALUE, message, param=name)
    param = ".".join(map(str, location))
    code = ErrorCode.INVALID_TYPE if kind.endswith("_type") else ErrorCode.INVALID_VALUE
    message = first["msg"].replace("Input should", "should")
    return ApiError(code, f"{param} {message}; got {_repr(first['input'])}", param=param)


def _json_type(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
    }
    return names[type(value)]


def inline_schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of ``model`` without ``$defs``, for a part of the OpenAPI document FastAPI does not fill."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rpartition("/")[2]])
            return {key: resolve(item) for key, item in value.items()}
        return [resolve(item) for item in value] if isinstance(value, list) else value

    resolved: dict[str, Any] = resolve(schema)
    return resolved
