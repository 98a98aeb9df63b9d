"""Request fields that every generating endpoint takes, and their conversion to sampling parameters.

Ranges are as in OpenAI's API reference; top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids, cache_salt and structured_outputs are as in vLLM 0.32. Types are strict: a string "1" is not
accepted as a number.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tonnage.server.engines.packed import TokenBiases, TokenIds
from tonnage.server.engines.request import SamplingParams
from tonnage.server.errors import ApiError, ErrorCode, invalid_value
from tonnage.server.text.grammar import Grammar
from tonnage.server.text.stop_strings import MAX_STOP_CHARACTERS

# OpenAI's limit of top_logprobs, and vLLM's default of --max-logprobs
MAX_TOP_LOGPROBS = 20

# maximum number of allowed_token_ids in a request; a logits mask of this many ids takes less than a millisecond
# per generated token
MAX_ALLOWED = 10_000
_INT64 = 2**63
_INT31 = 2**31

# Type of a token id in a request body: the limit keeps ids within int32 tensors. Ids outside the vocabulary are
# rejected later.
TokenId = Annotated[int, Field(ge=0, lt=_INT31)]
# Type of a number of tokens in a request body, which is compared with the context length later. The limit keeps
# sums printable in error messages: Python prints integers of at most 4,300 digits
# (sys.int_info.default_max_str_digits).
TokenCount = Annotated[int, Field(ge=0, lt=_INT31)]
AtLeastOne = Annotated[int, Field(ge=1, lt=_INT31)]
BadWord = Annotated[str, Field(pattern=r"\S", max_length=256)]
StopString = Annotated[str, Field(min_length=1)]
StopStringList = Annotated[list[StopString], Field(fail_fast=True)]
STOP_EXPECTED = f"a string or a list of strings, of at most {MAX_STOP_CHARACTERS:,} characters together"


Stop = TypeVar("Stop", bound="str | list[str] | None")


def short_stop(stop: Stop) -> Stop:
    """Return a request's ``stop`` unchanged; raise ValueError when its strings have too many characters."""
    if stop is not None and sum(map(len, [stop] if isinstance(stop, str) else stop)) > MAX_STOP_CHARACTERS:
        raise ValueError(STOP_EXPECTED)
    return stop


class StrictModel(BaseModel):
    """Base class of the objects in request bodies; it rejects unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """OpenAI's ``stream_options``: whether a streamed answer also reports its token usage."""

    include_usage: bool | None = None
    # vLLM's field: if include_usage is also set, every chunk of the stream has the token usage
    continuous_usage_stats: bool | None = None


class JsonSchema(StrictModel):
    """A named JSON schema; ``strict`` has no effect, because the answer always matches the schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's ``response_format``: free text, any JSON object, or a named JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictModel):
    """vLLM's ``structured_outputs``: a constraint on the answer, with exactly one of its fields set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1, max_length=10_000)
    choice: list[str] | None = Field(None, min_length=1, max_length=1000, fail_fast=True)
    grammar: str | None = Field(None, min_length=1, max_length=100_000)
    json_object: bool | None = None


class EngineBody(StrictModel):
    """Base class of all request bodies that lead to a request to the engine."""

    model: str
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-1000, le=1000, description="lower runs first")
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,128}$")

    @property
    def streams(self) -> bool:
        """Whether the client requests the answer as server-sent events."""
        return bool(getattr(self, "stream", False))


# fields of request bodies that are no longer needed while the request waits, because they were converted
_CONVERTED = frozenset({
    "allowed_token_ids", "bad_words", "chat_template_kwargs", "instructions", "logit_bias", "metadata",
    "response_format", "stop_token_ids", "structured_outputs", "suffix", "text", "tools",
})  # fmt: skip


class SamplingFields(EngineBody):
    """Base class of the request bodies that generate text, with their sampling fields."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[StopString | StopStringList | None, AfterValidator(short_stop)] = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT31, description="-1 or 0: all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    min_tokens: TokenCount | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED, fail_fast=True)
    bad_words: list[BadWord] | None = Field(None, max_length=64)
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=_INT31, description="keep the last tokens of the prompt; -1: as many as fit",
        json_schema_extra={"not": {"const": 0}},
    )  # fmt: skip

    def grammar(self) -> Grammar | None:
        """Return the grammar of ``structured_outputs`` (JSON schema, regex ...) that the answer must match.

        Subclasses also read their field ``response_format``.
        """
        constraint = self.structured_outputs
        if constraint is None:
            return None
        given = [name for name, value in constraint.model_dump(exclude_none=True).items() if value is not False]
        if len(given) != 1:
            raise invalid_value(
                "structured_outputs takes exactly one of json, regex, choice, grammar, json_object",
                "structured_outputs",
            )
        if constraint.json_ is not None:
            text = constraint.json_ if isinstance(constraint.json_, str) else json.dumps(constraint.json_)
            return Grammar("json_schema", text)
        if constraint.regex is not None:
            return Grammar("regex", constraint.regex)
        if constraint.choice is not None:
            return Grammar("choice", json.dumps(constraint.choice))
        if constraint.grammar is not None:
            return Grammar("grammar", constraint.grammar)
        return Grammar("json_object")

    def stop_strings(self) -> tuple[str, ...]:
        """Return the request's stop strings as a tuple, which is empty when it has none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def include_usage(self) -> bool:
        """Return whether the last event of the streamed answer has the token usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def continuous_usage(self) -> bool:
        """Return whether every event of the streamed answer has the token usage so far."""
        return self.include_usage() and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(
        self,
        max_tokens: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Return the engine's sampling parameters for this request.

        Args:
            max_tokens: Maximum number of completion tokens.
            eos_token_ids: The tokens that end a completion. Ids outside the vocabulary are dropped: no engine
                can sample them, and one engine would index the logits with them.
            vocab_size: Number of tokens in the vocabulary.
            logprobs: Alternatives per completion token, or None for no log probabilities.
            prompt_logprobs: Alternatives per prompt token, or None for no log probabilities.

        Raises:
            ApiError: Fields contradict each other, or a token id is outside the vocabulary.
        """
        eos = () if self.ignore_eos else tuple(token for token in eos_token_ids if token < vocab_size)
        if self.min_tokens is not None and self.min_tokens > max_tokens:
            raise invalid_value(
                f"min_tokens is {self.min_tokens}, more than the {max_tokens} of max_tokens", "min_tokens"
            )
        for token in self.stop_token_ids or ():
            _in_vocabulary(token, vocab_size, "stop_token_ids")
        for token in self.allowed_token_ids or ():
            _in_vocabulary(token, vocab_size, "allowed_token_ids")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop_token_ids=(*eos, *(self.stop_token_ids or ())),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self._biases(vocab_size),
            min_tokens=self.min_tokens or 0,
            grammar=self.grammar(),
            allowed_token_ids=TokenIds(self.allowed_token_ids) if self.allowed_token_ids else (),
            bad_words=tuple(self.bad_words or ()),
        )

    def forget(self) -> None:
        """Remove the fields of this body that were converted into sampling parameters, a grammar or a prompt.

        This frees memory: a waiting request needs only the results of the conversion.
        """
        for name in _CONVERTED & type(self).model_fields.keys():
            setattr(self, name, None)

    def _biases(self, vocab_size: int) -> tuple[()] | TokenBiases:
        if not self.logit_bias:
            return ()
        biases = []
        for name, bias in self.logit_bias.items():
            if not (name.isascii() and name.isdigit() and len(name) <= 10):
                raise invalid_value(f"logit_bias: {name[:60]!r} is not a token id", "logit_bias")
            biases.append((_in_vocabulary(int(name), vocab_size, "logit_bias"), bias))
        return TokenBiases(biases)


def prompt_list(items: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """Return a prompt, which has four forms, as a list of texts or a list of token id lists."""
    if isinstance(items, str):
        return [items]
    if isinstance(items[0], int):
        # The first item decides between token ids and texts, because the protocol allows no mixed lists.
        return [items]
    return items


def grammar_of(response_format: ResponseFormat | None) -> Grammar | None:
    """Return the grammar that OpenAI's ``response_format`` describes, or None for text."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return Grammar("json_object")
    if response_format.json_schema is None:
        raise ApiError(
            ErrorCode.MISSING_PARAMETER,
            "you must provide response_format.json_schema",
            param="response_format.json_schema",
        )
    return Grammar("json_schema", json.dumps(response_format.json_schema.schema_ or {}))


def check_stream_options(body: SamplingFields) -> None:
    """Raise ApiError when a request has stream_options but does not stream."""
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options is only allowed with stream: true", "stream_options")


def _in_vocabulary(token: int, vocab_size: int, field: str) -> int:
    if token >= vocab_size:
        raise invalid_value(
            f"{field}: token id {token} is outside the vocabulary of {vocab_size} tokens", field
        )
    return token
