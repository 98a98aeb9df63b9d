"""Request bodies: from bytes to a validated protocol model, or an error that names the field.

FastAPI does not read the bodies, because its validation errors would return a copy of the input. This module
instead reports an invalid field by a short error in OpenAI's format, as ``json_body`` does for invalid JSON.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request

from tonnage.server.api.fields import FieldRule, FieldTable, Standing
from tonnage.server.api.json_body import (
    MAX_ITEMS,
    MAX_VALUES,
    document_steps,
    most_values,
    read_body,
    shown,
)
from tonnage.server.engines.request import BASIC_PARAMS
from tonnage.server.errors import ApiError, ErrorCode, invalid_value, unsupported_parameter
from tonnage.server.state import ServerState

Model = TypeVar("Model", bound=BaseModel)

# Lenient mode drops at most this many unknown nested fields, because each may need another validation of the
# body.
_MAX_UNKNOWN = 20
# Validation yields to the event loop after this many seconds of work.
_STEP_SECONDS = 0.005
# Maximum number of field names in the response header x-ignored-fields, which keeps it below 3 KB. nginx takes
# 4 KB for all headers of a response (its documentation, proxy_buffer_size).
_MAX_LISTED = 32


@dataclass(frozen=True, slots=True)
class Fields(Generic[Model]):
    """A pydantic model of a request body, with the table that says which fields the API honours.

    ``expected`` maps a field of several types to a description of its values, for error messages. ``drop``
    removes the parts of a body that have no effect, before the validation, and returns their names. ``items``
    maps a field to the type of its items; lists in these fields may be long and are validated in several steps.
    """

    model: type[Model]
    table: FieldTable
    expected: Mapping[str, str] = field(default_factory=dict)
    drop: Callable[[dict[str, Any]], Sequence[str]] = lambda document: ()
    items: Mapping[str, TypeAdapter[Any]] = field(default_factory=dict)


async def read_fields(
    request: Request, state: ServerState, fields: Fields[Model]
) -> tuple[Model, tuple[str, ...], int]:
    """Read and validate the body of an HTTP request.

    Returns:
        The validated body, the names of its fields that had no effect, and its size in bytes.

    Raises:
        ApiError: The body is invalid, too large or too slow; the message names the field and what it accepts.
        ClientDisconnected: The client disconnected.
    """
    settings = state.settings
    raw = await read_body(request, settings.max_request_body_bytes, settings.body_timeout, state.bodies)
    most = most_values(state.max_model_len)
    steps = parse_steps(raw, fields, state.honours, lenient=settings.lenient, most=most)
    body, ignored = await state.bodies.in_turn(len(raw), steps)
    return body, ignored, len(raw)


def parse_steps(
    body: bytes | bytearray,
    fields: Fields[Model],
    honours: frozenset[str] = BASIC_PARAMS,
    *,
    lenient: bool = False,
    most: int = MAX_VALUES,
) -> Generator[None, None, tuple[Model, tuple[str, ...]]]:
    """Validate a request body; the generator yields after each step, so that other tasks can run in between.

    ``http.bodies.completed`` runs all steps at once.

    Args:
        body: The JSON text.
        fields: The pydantic model of the endpoint's request body, with its table of honoured fields.
        honours: Names of the sampling parameters that the engine honours.
        lenient: Whether to drop unknown fields instead of rejecting the request.
        most: Maximum number of JSON values in the body (``most_values``).

    Returns:
        As the generator's value, the validated body (a pydantic model) and the names of the fields that had no
        effect.

    Raises:
        ApiError: The body is invalid; the message names the field and what it accepts.
    """
    document = yield from document_steps(body, most, fields.table)
    yield
    ignored = [*fields.drop(document)]
    ignored += _apply(document, fields.table, honours, lenient, "")
    for name in {rule.partition(".")[0] for rule in fields.table if "." in rule}:
        if isinstance(document.get(name), dict):
            inside = {
                rule.removeprefix(f"{name}."): value
                for rule, value in fields.table.items()
                if rule.startswith(f"{name}.")
            }
            ignored += _apply(document[name], inside, honours, lenient, f"{name}.")
    for name, adapter in fields.items.items():
        if isinstance(found := document.get(name), list) and len(found) <= MAX_ITEMS:
            yield from _validate_items(found, adapter)
    unknown = _MAX_UNKNOWN if lenient else 0
    while True:
        yield
        try:
            return fields.model.model_validate(document), _listed(ignored)
        except ValidationError as error:
            dropped = _drop_unknown(error, document, unknown)
            if not dropped:
                raise _refusal(error, document, fields) from None
            ignored += (name for names in dropped for name in names)
            unknown -= len(dropped)


def _validate_items(items: list[Any], adapter: TypeAdapter[Any]) -> Generator[None, None, None]:
    """Validate the items of a list in place, and return early, without an error, at the first invalid one.

    The later validation of the whole request body reports the invalid item.
    """
    begun = time.perf_counter()
    for at, item in enumerate(items):
        try:
            items[at] = adapter.validate_python(item)
        except ValidationError:
            return
        if time.perf_counter() - begun > _STEP_SECONDS:
            yield
            begun = time.perf_counter()


def _apply(
    document: dict[str, Any], table: FieldTable, honours: frozenset[str], lenient: bool, prefix: str
) -> list[str]:
    """Remove the fields without effect from a request body; return the names to report as ignored.

    ``prefix`` precedes the names: it is empty for the body itself, and ``stream_options.`` for that object.
    Raises ApiError for a field that the API or the engine does not support.
    """
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
                    f"{prefix}{name} must be {rule.takes.name}; got {shown(value)}",
                    param=f"{prefix}{name}",
                )
            ignored.append(f"{prefix}{name}")
        elif rule.standing is Standing.REFUSED or (rule.needs and rule.needs not in honours):
            del document[name]
            if value is not None and not any(_same(value, neutral) for neutral in rule.neutral):
                raise _unsupported(f"{prefix}{name}", value, rule)
    return ignored


def _listed(names: Sequence[str]) -> tuple[str, ...]:
    """Return the field names for the header x-ignored-fields: the first 32, and the number of the others.

    A ``?`` replaces each character that a header cannot have. The number of names is limited, because clients
    and proxies reject long headers and a waiting request keeps the names in memory.
    """
    first = tuple(
        "".join(c if c.isascii() and c.isprintable() else "?" for c in name) for name in names[:_MAX_LISTED]
    )
    return first if len(names) <= _MAX_LISTED else (*first, f"and {len(names) - _MAX_LISTED} more")


def _dotted(location: Sequence[int | str]) -> str:
    """Return a field's path in the request body as text, such as ``messages.0.content``.

    Each name is cut to 60 characters, because it may come from the client.
    """
    return ".".join(str(part)[:60] for part in location)


def _same(value: Any, neutral: Any) -> bool:
    # In Python 0 == False and 1 == True, but as values of a field they are different.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _unsupported(name: str, value: Any, rule: FieldRule) -> ApiError:
    subject = "this server's engine" if rule.needs else "this server"
    why = f": {rule.why}" if rule.why else ""
    hint = f"leave it out or send {shown(rule.neutral[0])}" if rule.neutral else "leave it out"
    return unsupported_parameter(
        f"{name} is not supported by {subject} (got {shown(value)}){why}; {hint}", name
    )


def _drop_unknown(error: ValidationError, document: dict[str, Any], most: int) -> list[list[str]]:
    """Delete unknown fields that are nested inside known fields of the body ``document``; return their paths.

    ``error`` is pydantic's error, which lists them. At most ``most`` fields are deleted.
    """
    dropped: list[list[str]] = []
    for found in error.errors(include_url=False, include_context=False, include_input=False):
        if len(dropped) == most:
            break
        if found["type"] != "extra_forbidden":
            continue
        *path, last = found["loc"]
        names = []
        # `_places` yields nothing for a field inside a union type: pydantic's path then contains the tag of one
        # of its types, which is no key in the body.
        for place, where in _places(document, path):
            if isinstance(where, dict) and last in where:
                del where[last]
                names.append(_dotted((*place, last)))
        if names:
            dropped.append(names)
    return dropped


def _places(value: Any, path: Sequence[int | str]) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Yield the path and the value of each place in the JSON document ``value`` that matches ``path``.

    A list index in ``path`` matches every item of the list, so several places may match. Each yielded path has
    the actual indices.
    """
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
    """Return an ApiError, with a message of one sentence, for pydantic's first validation error."""
    first = error.errors(include_url=False, include_context=False)[0]
    kind, location = first["type"], first["loc"]
    if kind == "missing":
        param = _dotted(location)
        return ApiError(ErrorCode.MISSING_PARAMETER, f"you must provide {param}", param=param)
    if kind == "extra_forbidden":
        param = _dotted(location)
        return ApiError(ErrorCode.UNKNOWN_PARAMETER, f"unknown field: {param}", param=param)
    value: Any = document
    for at, part in enumerate(location):
        # For a union type, pydantic's location includes the name of one of its types, not a key in the body.
        if isinstance(value, dict):
            value = value.get(part, value)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        if part in fields.expected:
            # pydantic reports one error for each type of a union, so the message describes the whole field.
            param = _dotted(location[: at + 1])
            message = f"{param} must be {fields.expected[str(part)]}, not empty; got {shown(value)}"
            return invalid_value(message, param)
    param = _dotted(location)
    code = ErrorCode.INVALID_TYPE if kind.endswith("_type") else ErrorCode.INVALID_VALUE
    message = first["msg"].replace("Input should", "should")
    return ApiError(code, f"{param} {message}; got {shown(first['input'])}", param=param)


def openapi_body(fields: Fields[Model], models: Sequence[str] = ()) -> dict[str, Any]:
    """Return a route's entry for its request body in the OpenAPI document, which FastAPI cannot derive.

    ``models`` are the allowed values of the field ``model``; if empty, any value is allowed.
    """
    schema = _inline_schema(fields)
    if models:
        schema["properties"]["model"]["enum"] = list(models)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inline_schema(fields: Fields[Model]) -> dict[str, Any]:
    """Return the JSON schema of a request body for the OpenAPI document, with all ``$defs`` inlined.

    The schema also lists the fields that are accepted without effect, with their types.
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
