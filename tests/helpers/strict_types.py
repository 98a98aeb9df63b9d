"""Types of the openai package, applied strictly: no conversion, no unknown fields, only permitted nulls."""

from __future__ import annotations

import json
from typing import Any

from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter


class ChunkChoice(CompletionChoice):
    """A choice whose ``finish_reason`` may be null.

    OpenAI's own streams of /v1/completions send null until the last chunk; openai's type does not permit it.
    """

    finish_reason: Any


class CompletionChunk(Completion):
    choices: list[ChunkChoice]  # type: ignore[assignment]


class EchoLogprobs(Logprobs):
    """The log probabilities of an echoed prompt, whose first token has none: null, as in OpenAI's answers."""

    token_logprobs: list[float | None]  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None  # type: ignore[assignment]


class EchoChoice(ChunkChoice):
    logprobs: EchoLogprobs | None


class EchoCompletion(Completion):
    choices: list[EchoChoice]  # type: ignore[assignment]


class OpenResponse(Response):
    """A response with the fields beyond openai's type that Open Responses requires and OpenAI sends."""

    store: bool
    presence_penalty: float
    frequency_penalty: float


OPEN_FIELDS = {f".response.{name}" for name in OpenResponse.__annotations__}


def strictly(model: Any, document: Any, extra: frozenset[str] = frozenset()) -> Any:
    """Check a document against a type and return it parsed; unknown are at most the fields of ``extra``."""
    parsed = TypeAdapter(model).validate_json(json.dumps(document), strict=True)
    found = unknown(parsed)
    assert found <= extra, found - extra
    return parsed


def unknown(value: Any, path: str = "") -> set[str]:
    """Return the paths of the fields that the types do not have."""
    found: set[str] = set()
    if isinstance(value, BaseModel):
        found |= {f"{path}.{name}" for name in (value.model_extra or {})}
        for name in type(value).model_fields:
            found |= unknown(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            found |= unknown(item, path)
    return found
