"""Reading of request bodies: from bytes to a JSON object of bounded size.

FastAPI does not read the bodies, because the size must be bounded during reading. Invalid UTF-8 and invalid
JSON are reported by a short error in OpenAI's format, which never contains a copy of the body.
"""

from __future__ import annotations

import asyncio
import json
import re
import reprlib
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any

import pydantic_core
from starlette.requests import Request

from tonnage.server.errors import ApiError, ErrorCode, invalid_value
from tonnage.server.http.bodies import BodyBytes, completed
from tonnage.server.http.disconnect import ClientDisconnected

# A client that is still sending does not read the answer. So a body over the limit is read and discarded, up to
# this many times the limit, before the error is sent.
_DISCARD_FACTOR = 8

# Limits of the number of values in a body, checked before Python objects are built. A conversation has at most
# MAX_ITEMS messages; ten objects and lists per message (parts, tool calls) are more than any known client
# needs.
MAX_ITEMS = 10_000
_MAX_CONTAINERS = 10 * MAX_ITEMS
# The values in a body's JSON text are counted before it is parsed, because two million empty objects (6 MB of
# text) would take 150 MB and half a second to build. Strings, including member names, are limited to 25 times
# MAX_ITEMS. Most other values are token ids: 2**18 of them take 10 MB and 20 ms. The limit of member names is
# lower than that of strings, because a name costs ten times as much, and one object may hold all of them.
_MAX_BRACKETS = 2 * _MAX_CONTAINERS
_MAX_NAMES = 12 * MAX_ITEMS
_MAX_STRINGS = 25 * MAX_ITEMS
MAX_VALUES = 2**18
# Text is counted in slices of this many bytes, so that splitting it at quotes takes little memory.
_COUNTED_AT_ONCE = 2**18
# Objects and lists of a parsed body are checked in groups of this many, which take about 5 ms.
_CHECKED_AT_ONCE = 10_000
# Limit of the members of one object. JSON schemas are the largest: OpenAI allows 5,000 properties (its guide to
# structured outputs).
_MAX_KEYS = 10_000

# A place in a JSON document, as the pair (outer, key). ``outer`` is the place of the enclosing object or list,
# None if that is the document itself. ``key`` is the member name or list index of a value; a member name itself
# has the key None.
_Place = tuple["_Place | None", str | int | None]
_WITH_TEXT = (str, list, dict)
_SURROGATE = re.compile("[\ud800-\udfff]")

_short = reprlib.Repr()  # Error messages show values shortened, so that a message does not grow with the body.
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 3
_short.maxlevel = 2
shown = _short.repr


async def read_body(request: Request, limit: int, seconds: float, bodies: BodyBytes) -> bytearray:
    """Read the body of an HTTP request, up to a limit of bytes.

    Args:
        request: The request.
        limit: Upper bound of the body's bytes.
        seconds: Time limit for the whole body.
        bodies: Counter of the body bytes that all requests hold in memory now, and their common limit.

    Raises:
        ApiError: The media type is wrong, or the body is too large, too slow, or exceeds the limit over all
            requests.
        ClientDisconnected: The client disconnected.
    """
    media = request.headers.get("content-type")
    if media is None and "origin" in request.headers:
        # Reject a POST from a web page without the JSON content type: any site's page could send it without a
        # preflight request (Fetch standard). It could then use a server without keys on the user's own machine.
        # Browsers always add Origin to a POST. Other clients may leave out the content type.
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
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            f"content-encoding {shown(encoding)} is not supported; send the JSON uncompressed",
        )
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, limit, bodies)
    except TimeoutError:
        raise ApiError(
            ErrorCode.REQUEST_TIMEOUT, f"the request body did not arrive within {seconds:g} s (body_timeout)"
        ) from None


async def _read(request: Request, limit: int, bodies: BodyBytes) -> bytearray:
    body = bytearray()  # A bytearray grows in place, whereas joining parts would hold the body twice.
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
        # Free the bytes now: the raised error refers to this frame and may live until the garbage collector
        # runs.
        body.clear()
        raise
    finally:
        bodies.release(held)
    if size > limit:
        raise ApiError(
            ErrorCode.REQUEST_TOO_LARGE, f"the request body is larger than the limit of {limit} bytes"
        )
    return body


def most_values(max_model_len: int) -> int:
    """Return the maximum number of JSON values in a body: two per token of the context, at least MAX_VALUES."""
    return max(MAX_VALUES, 2 * max_model_len)


def document_steps(
    body: bytes | bytearray, most: int, names: Collection[str]
) -> Generator[None, None, dict[str, Any]]:
    """Parse a body into a JSON object of bounded size; the generator yields after each step.

    The event loop can run other tasks between two steps. A body of 8 MB takes 50 ms in all.

    Args:
        body: The JSON text.
        most: Maximum number of JSON values (``most_values``).
        names: Field names that an error message may repeat.

    Returns:
        The JSON object, as the generator's value.

    Raises:
        ApiError: The body is not a JSON object, or is too large.
    """
    yield from _check_values(body, most)
    document = yield from _json_object(body)
    yield
    yield from _check_size(document, names)
    return document


def _check_values(
    body: bytes | bytearray, most: int, where: str = "the request"
) -> Generator[None, None, None]:
    """Raise ApiError when the JSON text has more objects, lists, strings or other values than are allowed.

    The generator yields after each slice of the text. It counts characters, so no Python object is built for a
    body that is too large. The counts are exact for valid JSON; the parser reports invalid JSON later.
    """
    # A text this short cannot exceed a limit, because each value takes at least two bytes.
    if len(body) <= 2 * _MAX_NAMES:
        return
    quotes = commas = brackets = names = 0
    more = ""
    cut = b""  # a backslash at the end of a slice, which escapes the first character of the next slice
    for at in range(0, len(body), _COUNTED_AT_ONCE):
        text = (cut + body[at : at + _COUNTED_AT_ONCE]).replace(b"\\\\", b"")
        cut = b"\\" if text.endswith(b"\\") else b""
        pieces = text.replace(b'\\"', b"").split(b'"')
        # The text is split at its quotes, so every second piece lies outside the JSON strings.
        outside = b"".join(pieces[quotes % 2 :: 2])
        quotes += len(pieces) - 1
        if quotes // 2 > _MAX_STRINGS:
            more = " and more"
            break
        commas += outside.count(b",")
        brackets += outside.count(b"{") + outside.count(b"[")
        names += outside.count(b":")
        yield
    for count, limit, what in (
        (quotes // 2, _MAX_STRINGS, "strings"),
        (brackets, _MAX_BRACKETS, "objects and lists"),
        (names, _MAX_NAMES, "names in objects"),
        (commas, most, "values"),
    ):
        if count > limit:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"{where} has {count} {what}{more}; at most {limit} are allowed"
            )


def check_embedded(texts: Sequence[str], most: int, where: str) -> None:
    """Check that JSON texts inside a body's strings have at most ``most`` JSON values, all together.

    Args:
        texts: JSON texts, which may be invalid.
        most: Maximum number of JSON values (``most_values``).
        where: Name of the field for the error.

    Raises:
        ApiError: All texts together have too many values.
    """
    if sum(map(len, texts)) > 2 * _MAX_NAMES:
        completed(_check_values("\n".join(texts).encode("utf-8", "replace"), most, where))


def _json_object(body: bytes | bytearray) -> Generator[None, None, dict[str, Any]]:
    try:
        document = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        _check_encoding(body)
        yield from _check_surrogates(body)
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


def _check_surrogates(body: bytes | bytearray) -> Generator[None, None, None]:
    """Raise ApiError, with the field's name, when a string has half of a surrogate pair (U+D83D alone)."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return
    try:
        document = json.loads(body)  # unlike pydantic's parser, json.loads accepts half of a surrogate pair
    except (ValueError, RecursionError):
        return
    yield
    # ``waiting`` holds each value with its `_Place`. A place becomes text only for the error, because a long
    # name repeated for each value inside it would exceed the machine's memory.
    waiting: list[tuple[_Place | None, Any]] = [(None, document)]
    checked = 0
    while waiting:
        checked += 1
        if checked % _CHECKED_AT_ONCE == 0:
            yield
        place, value = waiting.pop()
        if isinstance(value, str):
            if found := _SURROGATE.search(value):
                path = _path(place)
                raise ApiError(
                    ErrorCode.INVALID_JSON,
                    f"{path[:120]}: character {found.start()} is half of a surrogate pair "
                    f"(U+{ord(found[0]):X}), which is no text; send both halves or the character itself",
                    param=path.partition(".")[0].partition("[")[0] or None,
                )
        elif isinstance(value, dict):
            if any(map(_SURROGATE.search, value)):
                waiting = [((place, None), name) for name in value]
                continue
            waiting += [((place, name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [((place, at), inner) for at, inner in enumerate(value) if isinstance(inner, _WITH_TEXT)]


def _path(place: _Place | None) -> str:
    """Return a place in a document as text, such as ``messages[0].content``; names are cut to 60 characters."""
    path = ""
    while place is not None:
        place, name = place
        if name is None:
            return f"a name in {_path(place) or 'the request'}"
        text = f"[{name}]" if isinstance(name, int) else f".{name[:60]}"
        path = text + path
    return path.removeprefix(".")


def _check_size(document: dict[str, Any], names: Collection[str]) -> Generator[None, None, None]:
    """Raise ApiError when the document has too many objects and lists, or an object with too many members.

    The generator yields after each ``_CHECKED_AT_ONCE`` objects and lists. The limits bound the memory of
    pydantic, which keeps a record of about one kilobyte for each invalid item. A list whose first item is a
    scalar is not checked: the models validate it with ``fail_fast``, so they stop at its first invalid item.
    """
    _check_keys(document, "the request", None)
    count = checked = 0
    for name, field_value in document.items():
        param = name if name in names else None  # a name that the client made up is not repeated in the error
        waiting = [field_value]
        while waiting:
            value = waiting.pop()
            checked += 1
            if checked % _CHECKED_AT_ONCE == 0:
                yield
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
                raise invalid_value(
                    f"{name[:60]}: the request has more than {_MAX_CONTAINERS} objects and lists", param
                )
            waiting += found


def _check_keys(value: dict[str, Any], where: str, param: str | None) -> None:
    if len(value) > _MAX_KEYS:
        raise invalid_value(
            f"{where}: an object has {len(value)} names; at most {_MAX_KEYS} are allowed", param
        )


def _json_type(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "an array"}
    return names.get(type(value), "a number")
