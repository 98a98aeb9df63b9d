"""From the bytes of a request to a JSON object of bounded size.

Read by hand instead of by FastAPI: the size is bounded while reading, and broken UTF-8 and broken JSON end in
the same small OpenAI error, never in a copy of the input.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Collection, Iterable
from typing import Any

import pydantic_core
from starlette.requests import Request

from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.http.bodies import BodyBytes
from tonnage.server.http.disconnect import ClientDisconnected

# A body over the limit is read to its end and thrown away up to this many times the limit: a client that is
# still sending does not read the answer.
_DISCARD_FACTOR = 8

# What a body may hold, before anything is built of it. A conversation has at most MAX_ITEMS messages, each with
# a few objects in it (parts, tool calls): ten for each is more than any needs.
MAX_ITEMS = 10_000
_MAX_CONTAINERS = 10 * MAX_ITEMS
# Two million empty objects, 6 MB of text, take 150 MB and half a second to build: the text is looked at first.
# Strings, names of members included: twenty-five for each message. Other values are token ids in the main: a
# quarter of a million take 10 MB and 20 ms. Names, which one object may have all of, cost ten times as much.
_MAX_BRACKETS = 2 * _MAX_CONTAINERS
_MAX_NAMES = 12 * MAX_ITEMS
_MAX_STRINGS = 25 * MAX_ITEMS
MAX_VALUES = 2**18
_COUNTED_AT_ONCE = 2**18  # bytes, so that the pieces between quotes take no memory to speak of
# JSON schemas have the largest objects: OpenAI allows 5,000 properties (its guide to structured outputs).
_MAX_KEYS = 10_000

_short = reprlib.Repr()  # an answer never grows with the body that caused it
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 3
_short.maxlevel = 2
shown = _short.repr


async def read_body(
    request: Request, limit: int, seconds: float | None = None, bodies: BodyBytes | None = None
) -> bytearray:
    """The body, at most ``limit`` bytes, sent within ``seconds``; its bytes count in ``bodies`` meanwhile.

    Raises ApiError (wrong media type, too large, too slow, too many at once), ClientDisconnected.
    """
    media = request.headers.get("content-type")
    if media is None and "origin" in request.headers:
        # A page of any site may send such a body without asking first (a preflight, Fetch standard), so it
        # could use a server without keys on its reader's machine. Browsers always add Origin to a POST; others
        # may leave the type out.
        raise ApiError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            "a web page (the request has an Origin) must send the header content-type: application/json",
        )
    media = (media or "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise ApiError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            f"content type {shown(media)} is not supported; send application/json",
        )
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, limit, bodies or BodyBytes(limit))
    except TimeoutError:
        raise ApiError(
            ErrorCode.REQUEST_TIMEOUT, f"the request body did not arrive within {seconds:g} s (body_timeout)"
        ) from None


async def _read(request: Request, limit: int, bodies: BodyBytes) -> bytearray:
    body = bytearray()  # grows in place: joined parts would be there twice
    size = held = 0
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part = message.get("body", b"")
            size += len(part)
            if size <= limit:
                bodies.hold(held, size)
                held = size
                body += part
            else:
                body.clear()
            if not message.get("more_body") or size > _DISCARD_FACTOR * limit:
                break
    except BaseException:
        body.clear()  # the error refers to this frame, and may wait for the garbage collector
        raise
    finally:
        bodies.release(held)
    if size > limit:
        raise ApiError(
            ErrorCode.REQUEST_TOO_LARGE, f"the request body is larger than the limit of {limit} bytes"
        )
    return body


def most_values(max_model_len: int) -> int:
    """That a body may hold: two prompts of token ids as long as the context, or many shorter ones."""
    return max(MAX_VALUES, 2 * max_model_len)


def read_document(body: bytes | bytearray, most: int, names: Collection[str]) -> dict[str, Any]:
    """The object. ``most``: values, see ``most_values``; ``names``: of fields, which an error may name. Raises
    ApiError."""
    _check_values(body, most)
    document = _json_object(body)
    _check_size(document, names)
    return document


def _check_values(body: bytes | bytearray, most: int) -> None:
    """Raises ApiError for more objects, lists, strings or other values than any request needs, before one of
    them is built. Exact for JSON; what is none is found out later."""
    if len(body) <= 2 * _MAX_NAMES:  # each takes two bytes and more
        return
    quotes = commas = brackets = names = 0
    more = ""
    cut = b""  # a backslash that belongs to the next slice's first character
    for at in range(0, len(body), _COUNTED_AT_ONCE):
        text = (cut + body[at : at + _COUNTED_AT_ONCE]).replace(b"\\\\", b"")
        cut = b"\\" if text.endswith(b"\\") else b""
        pieces = text.replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[quotes % 2 :: 2])  # what stands between the strings
        quotes += len(pieces) - 1
        if quotes // 2 > _MAX_STRINGS:
            more = " and more"
            break
        commas += outside.count(b",")
        brackets += outside.count(b"{") + outside.count(b"[")
        names += outside.count(b":")
    for count, limit, what in (
        (quotes // 2, _MAX_STRINGS, "strings"),
        (brackets, _MAX_BRACKETS, "objects and lists"),
        (names, _MAX_NAMES, "names in objects"),
        (commas, most, "values"),
    ):
        if count > limit:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"the request has {count} {what}{more}; at most {limit} are allowed"
            )


def _json_object(body: bytes | bytearray) -> dict[str, Any]:
    try:
        document = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        _check_encoding(body)
        raise ApiError(ErrorCode.INVALID_JSON, f"the request body is not JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise ApiError(
            ErrorCode.INVALID_TYPE, f"the request body must be a JSON object, not {_json_type(document)}"
        )
    return document


def _check_encoding(body: bytes | bytearray) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(
            ErrorCode.INVALID_ENCODING,
            f"the request body is not UTF-8 (byte {error.start} is 0x{body[error.start]:02x})",
        ) from None


def _check_size(document: dict[str, Any], names: Collection[str]) -> None:
    """Raises ApiError for more objects and lists, or a larger object, than any request needs: pydantic keeps a
    record of a kilobyte for each wrong one.

    A list whose first item is a scalar is not looked through. The models read it with ``fail_fast``, to its
    first wrong item.
    """
    _check_keys(document, "the request", None)
    count = 0
    for name, field_value in document.items():
        param = name if name in names else None  # a key of the client's own is no field
        waiting = [field_value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                _check_keys(value, name[:60], param)
                inside: Iterable[Any] = value.values()
            elif isinstance(value, list) and value and isinstance(value[0], (dict, list)):
                inside = value
            else:
                continue
            found = [item for item in inside if isinstance(item, (dict, list))]
            count += len(found)
            if count > _MAX_CONTAINERS:
                raise ApiError(
                    ErrorCode.INVALID_VALUE,
                    f"{name[:60]}: the request has more than {_MAX_CONTAINERS} objects and lists",
                    param=param,
                )
            waiting += found


def _check_keys(value: dict[str, Any], where: str, param: str | None) -> None:
    if len(value) > _MAX_KEYS:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{where}: an object has {len(value)} names; at most {_MAX_KEYS} are allowed",
            param=param,
        )


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
