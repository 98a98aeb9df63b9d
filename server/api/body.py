"""From the bytes of a request to a strict protocol model, or a refusal that names the field.

Read by hand instead of by FastAPI: the size is bounded while reading, and broken UTF-8, broken JSON and wrong
fields all end in the same small OpenAI error, never in a copy of the input.
"""

from __future__ import annotations

import asyncio
import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from tonnage.server.api.fields import FieldRule, FieldTable, Standing
from tonnage.server.engines.request import BASIC_PARAMS
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.http.bodies import BodyBytes
from tonnage.server.http.disconnect import ClientDisconnected

Model = TypeVar("Model", bound=BaseModel)

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
_MAX_VALUES = 2**18
_COUNTED_AT_ONCE = 2**18  # bytes, so that the pieces between quotes take no memory to speak of
# JSON schemas have the largest objects: OpenAI allows 5,000 properties (its guide to structured outputs).
_MAX_KEYS = 10_000
# Unknown names inside of known fields that a lenient server leaves out; each may cost a validation.
_MAX_UNKNOWN = 20

_short = reprlib.Repr()  # an answer never grows with the body that caused it
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 3
_short.maxlevel = 2
_repr = _short.repr


@dataclass(frozen=True, slots=True)
class Fields(Generic[Model]):
    """A protocol model with the table of its fields; ``expected`` says what a field of several types takes."""

    model: type[Model]
    table: FieldTable
    expected: Mapping[str, str] = field(default_factory=dict)


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
            f"content type {_repr(media)} is not supported; send application/json",
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
    return max(_MAX_VALUES, 2 * max_model_len)


def parse_body(
    body: bytes | bytearray,
    fields: Fields[Model],
    honours: frozenset[str] = BASIC_PARAMS,
    *,
    lenient: bool = False,
    most: int = _MAX_VALUES,
) -> tuple[Model, tuple[str, ...]]:
    """A validated instance of ``fields.model``, and the names of the fields that had no effect.

    ``honours``: what the engine acts on; ``most``: values, see ``most_values``. Raises ApiError naming the
    field and what is right.
    """
    _check_values(body, most)
    document = _json_object(body)
    _check_size(document, fields.table)
    ignored = _apply(document, fields.table, honours, lenient, "")
    for name in {rule.partition(".")[0] for rule in fields.table if "." in rule}:
        if isinstance(document.get(name), dict):
            inside = {
                rule.removeprefix(f"{name}."): value
                for rule, value in fields.table.items()
                if rule.startswith(f"{name}.")
            }
            ignored += _apply(document[name], inside, honours, lenient, f"{name}.")
    unknown = _MAX_UNKNOWN if lenient else 0
    while True:
        try:
            return fields.model.model_validate(document), tuple(ignored)
        except ValidationError as error:
            dropped = _drop_unknown(error, document, unknown)
            if not dropped:
                raise _refusal(error, document, fields) from None
            ignored += (name for names in dropped for name in names)
            unknown -= len(dropped)


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


def _check_size(document: dict[str, Any], table: FieldTable) -> None:
    """Raises ApiError for more objects and lists, or a larger object, than any request needs: pydantic keeps a
    record of a kilobyte for each wrong one.

    A list whose first item is a scalar is not looked through. The models read it with ``fail_fast``, to its
    first wrong item.
    """
    _check_keys(document, "the request", None)
    count = 0
    for name, field_value in document.items():
        param = name if name in table else None  # a key of the client's own is no field
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


def _apply(
    document: dict[str, Any], table: FieldTable, honours: frozenset[str], lenient: bool, prefix: str
) -> list[str]:
    """Take what is not for the model out of ``document``; the names of what is ignored."""
    ignored: list[str] = []
    for name in list(document):
        rule, value = table.get(name), document[name]
        if rule is None:
            if not lenient:
                param = f"{prefix}{name[:60]}"
                close = difflib.get_close_matches(name[:60], table, n=1)
                hint = f" (did you mean {prefix}{close[0]}?)" if close else ""
                raise ApiError(ErrorCode.UNKNOWN_PARAMETER, f"unknown field: {param}{hint}", param=param)
            del document[name]
            ignored.append(f"{prefix}{name[:60]}")
        elif rule.standing is Standing.IGNORED:
            del document[name]
            if value is None:
                continue
            if rule.takes is not None and not rule.takes.accepts(value):
                raise ApiError(
                    ErrorCode.INVALID_TYPE,
                    f"{prefix}{name} must be {rule.takes.name}; got {_repr(value)}",
                    param=f"{prefix}{name}",
                )
            ignored.append(f"{prefix}{name}")
        elif rule.standing is Standing.REFUSED or (rule.needs and rule.needs not in honours):
            del document[name]
            if value is not None and not any(_same(value, neutral) for neutral in rule.neutral):
                raise _unsupported(f"{prefix}{name}", value, rule)
    return ignored


def _same(value: Any, neutral: Any) -> bool:
    # bool is an int in Python: 0 and False, 1 and True must not pass for each other
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _unsupported(name: str, value: Any, rule: FieldRule) -> ApiError:
    whom = "this server's engine" if rule.needs else "this server"
    why = f": {rule.why}" if rule.why else ""
    hint = f"leave it out or send {_repr(rule.neutral[0])}" if rule.neutral else "leave it out"
    return ApiError(
        ErrorCode.UNSUPPORTED_PARAMETER,
        f"{name} is not supported by {whom} (got {_repr(value)}){why}; {hint}",
        param=name,
    )


def _drop_unknown(error: ValidationError, document: dict[str, Any], most: int) -> list[list[str]]:
    """Delete at most ``most`` unknown fields inside of known ones; the places of each, dotted.

    In a list a field is deleted from every item, because the models tell of the first wrong one only.
    """
    dropped: list[list[str]] = []
    for found in error.errors(include_url=False, include_context=False, include_input=False):
        if len(dropped) == most:
            break
        if found["type"] != "extra_forbidden":
            continue
        *path, last = found["loc"]
        names = []
        for place, where in _places(document, path):  # none in a member of a union: its tag is in the path
            if isinstance(where, dict) and last in where:
                del where[last]
                names.append(".".join(str(part)[:60] for part in (*place, last)))
        if names:
            dropped.append(names)
    return dropped


def _places(value: Any, path: Sequence[int | str]) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Where ``path`` leads in ``value``, in every item of the lists on the way."""
    if not path:
        yield (), value
    elif isinstance(value, list) and isinstance(path[0], int):
        for at, item in enumerate(value):
            for place, where in _places(item, path[1:]):
                yield (at, *place), where
    elif isinstance(value, dict) and path[0] in value:
        for place, where in _places(value[path[0]], path[1:]):
            yield (path[0], *place), where


def _refusal(error: ValidationError, document: dict[str, Any], fields: Fields[Model]) -> ApiError:
    """The first error of pydantic in one sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    kind, location = first["type"], first["loc"]
    if kind == "missing":
        param = ".".join(map(str, location))
        return ApiError(ErrorCode.MISSING_PARAMETER, f"you must provide {param}", param=param)
    if kind == "extra_forbidden":
        param = ".".join(str(part)[:60] for part in location)
        return ApiError(ErrorCode.UNKNOWN_PARAMETER, f"unknown field: {param}", param=param)
    value: Any = document
    for at, part in enumerate(location):
        # In a union the name of its member is in the location, and not in the value.
        if isinstance(value, dict):
            value = value.get(part, value)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        if part in fields.expected:
            # A union: pydantic lists one error for each member, so say what the field takes as a whole.
            param = ".".join(map(str, location[: at + 1]))
            message = f"{param} must be {fields.expected[str(part)]}, not empty; got {_repr(value)}"
            return ApiError(ErrorCode.INVALID_VALUE, message, param=param)
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


def inline_schema(fields: Fields[Model]) -> dict[str, Any]:
    """JSON schema of a body without ``$defs``, for the part of the OpenAPI document FastAPI does not fill.

    Fields that are accepted without effect are in it, with the values they take.
    """
    schema = fields.model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rpartition("/")[2]])
            return {key: resolve(item) for key, item in value.items()}
        return [resolve(item) for item in value] if isinstance(value, list) else value

    resolved: dict[str, Any] = resolve(schema)
    for name, rule in fields.table.items():
        if rule.standing is Standing.IGNORED and "." not in name:
            takes = {} if rule.takes is None else {"anyOf": [dict(rule.takes.schema), {"type": "null"}]}
            resolved["properties"].setdefault(name, takes | {"description": "accepted, without effect"})
    return resolved
