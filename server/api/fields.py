"""The request fields of OpenAI's specification and of vLLM's extensions, and how the API treats each.

Each field is honoured, accepted without effect (listed in the response header ``x-ignored-fields``) or rejected
by name. A request with a field in no table gets status 400; with ``--lenient`` the field is ignored and listed.
``tonnage doctor --fields`` prints the tables. Tests compare the tables with the openai package's parameter
types and vLLM's protocol classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Standing(StrEnum):
    """How the API treats a request field: honour it, accept it without effect, or reject it."""

    HONOURED = "honoured"
    IGNORED = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a field that is accepted without effect.

    ``name`` is the type in words, ``schema`` its JSON schema, and ``accepts`` checks a value that is not null.
    """

    name: str
    schema: Mapping[str, Any]
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class FieldRule:
    """How the API treats one request field.

    Attributes:
        standing: Whether the field is honoured, accepted without effect, or rejected.
        neutral: Values that mean the same as leaving the field out (as null does); they are always accepted.
        needs: The field of SamplingParams (or ``priority``) that the engine must support; otherwise the request
            field is rejected.
        why: Why the field is rejected; for an honoured field, what it requires.
        takes: The type of a field without effect; None accepts any value.
    """

    standing: Standing
    neutral: tuple[Any, ...] = ()
    needs: str | None = None
    why: str = ""
    takes: ValueType | None = None


FieldTable = Mapping[str, FieldRule]


def _honoured(*names: str, why: str = "") -> dict[str, FieldRule]:
    return {name: FieldRule(Standing.HONOURED, why=why) for name in names}


def _ignored(*names: str, takes: ValueType | None = None) -> dict[str, FieldRule]:
    return {name: FieldRule(Standing.IGNORED, takes=takes) for name in names}


def _refused(why: str = "", **names: tuple[Any, ...]) -> dict[str, FieldRule]:
    return {name: FieldRule(Standing.REFUSED, neutral, why=why) for name, neutral in names.items()}


def _needs(needs: str = "", **names: tuple[Any, ...]) -> dict[str, FieldRule]:
    return {name: FieldRule(Standing.HONOURED, neutral, needs or name) for name, neutral in names.items()}


# The types are from OpenAI's API reference. Any string is accepted as a service tier or an effort, because
# OpenAI changes these names.
_BOOLEAN = ValueType("a boolean", {"type": "boolean"}, lambda value: isinstance(value, bool))
_STRING = ValueType("a string", {"type": "string"}, lambda value: isinstance(value, str))
_METADATA = ValueType(
    "an object of at most 16 strings",
    {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 16},
    lambda value: (
        isinstance(value, dict) and len(value) <= 16 and all(isinstance(v, str) for v in value.values())
    ),
)


# -- fields that completions and chat completions share ---------------------------------------------------

_GENERATION: dict[str, FieldRule] = {
    **_honoured("model", "max_tokens", "n", "stream", "stream_options", "stop", "seed", "temperature", "top_p"),
    **_honoured("stream_options.include_usage", "stream_options.continuous_usage_stats"),
    **_honoured("top_k", "ignore_eos", "stop_token_ids", "cache_salt", "request_id"),
    **_honoured("add_special_tokens", "skip_special_tokens", "include_stop_str_in_output"),
    **_honoured("truncate_prompt_tokens"),
    **_needs(allowed_token_ids=([],), bad_words=([],), min_p=(0,), presence_penalty=(0,)),
    **_needs(frequency_penalty=(0,), repetition_penalty=(1,), logit_bias=({},), min_tokens=(0,)),
    **_needs("grammar", response_format=({"type": "text"},), structured_outputs=()),
    **_needs(priority=(0,)),
    **_honoured("return_token_ids"),
    **_needs(prompt_logprobs=()),
    # These fields are accepted without effect: they control OpenAI's billing, storage and abuse detection, or
    # the logs of other servers.
    **_ignored("user", "session_id"),
    # With include_obfuscation OpenAI pads its events against traffic analysis. No client depends on the
    # padding, so the field has no effect here.
    **_ignored("stream_options.include_obfuscation"),
    **_refused(
        use_beam_search=(False,),
        length_penalty=(1,),
        watermarking=(False,),
        spaces_between_special_tokens=(True,),
        truncation_side=("left",),
        logits_processors=([],),
        logprob_token_ids=([],),
        return_tokens_as_token_ids=(False,),
        return_token_offsets=(False,),
        routed_experts_prompt_start=(0,),
        mm_payload=("inline",),
        return_mm_kwargs=(False,),
        kv_transfer_params=(),
        ec_transfer_params=(),
        vllm_xargs=({},),
        repetition_detection=(),
        thinking_token_budget=(),
        stream_interval=(1,),
    ),
    **_refused(
        "removed from vLLM; send response_format or structured_outputs",
        guided_json=(),
        guided_regex=(),
        guided_choice=(),
        guided_grammar=(),
        guided_decoding_backend=(),
        guided_whitespace_pattern=(),
    ),
}

COMPLETION: FieldTable = {
    **_GENERATION,
    **_honoured("prompt", "echo"),
    **_honoured("suffix", why="a model with fill-in-the-middle tokens"),
    **_needs(logprobs=()),
    # best_of returns the n sequences with the highest mean log probability; with best_of = n there is nothing
    # to select.
    **_honoured("best_of"),
    **_refused("send the prompt as text or token ids", prompt_embeds=([],)),
}

_TOOLS = "functions, and a chat template that shows them; auto: a tool parser too"

CHAT: FieldTable = {
    **_GENERATION,
    **_honoured("messages", "max_completion_tokens"),
    **_honoured("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    **_needs("logprobs", logprobs=(False,), top_logprobs=(0,)),
    **_ignored("store", takes=_BOOLEAN),
    **_ignored("metadata", takes=_METADATA),
    **_ignored("service_tier", takes=_STRING),
    **_honoured("reasoning_effort", why="a chat template that reads reasoning_effort or enable_thinking"),
    **_ignored("safety_identifier", "verbosity"),
    **_honoured("include_reasoning", why="a reasoning parser"),
    **_ignored("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **_honoured("tools", "tool_choice", "parallel_tool_calls", why=_TOOLS),
    **_refused("deprecated by OpenAI: send tools", functions=([],)),
    **_refused("deprecated by OpenAI: send tool_choice", function_call=("none", "auto")),
    **_refused("the model takes and gives text only", modalities=(["text"],), audio=(), mm_processor_kwargs=()),
    **_refused("the model takes and gives text only", media_io_kwargs=()),
    **_refused(prediction=(), web_search_options=(), moderation=(), echo=(False,), documents=([],)),
    **_refused(return_prompt_text=(False,)),
    **_refused("a template from a request could run forever; start the server with it", chat_template=()),
}

_NOTHING_STORED = "nothing is stored: send the whole conversation as input"

RESPONSES: FieldTable = {
    **{name: rule for name, rule in _GENERATION.items() if name not in ("n", "max_tokens", "response_format")},
    **_honoured("input", "instructions", "max_output_tokens", "metadata", "chat_template_kwargs"),
    **_needs("grammar", text=({"format": {"type": "text"}}, {})),
    **_honoured("tools", "tool_choice", "parallel_tool_calls", why=_TOOLS),
    **_ignored("store", takes=_BOOLEAN),
    **_ignored("service_tier", takes=_STRING),
    **_ignored("safety_identifier", "max_tool_calls"),
    **_ignored("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **_ignored("client_metadata"),  # Codex sends data about its session in client_metadata
    **_honoured("reasoning", why="a chat template that reads reasoning_effort or enable_thinking"),
    **_honoured("include_reasoning", why="a reasoning parser"),
    **_refused("the last event has the usage", **{"stream_options.continuous_usage_stats": (False,)}),
    **_refused(_NOTHING_STORED, previous_response_id=(), conversation=(), prompt=(), background=(False,)),
    **_refused(_NOTHING_STORED, background_options=(), previous_input_messages=([],)),
    **_refused("the model takes and gives text only", image=(), mm_processor_kwargs=(), media_io_kwargs=()),
    **_refused("a prompt that is too long is refused", truncation=("disabled",)),
    **_refused(include=([],), top_logprobs=(0,), moderation=(), context_management=([],), access_programs=()),
    **_refused(enable_response_messages=(False,), chat_template=()),
    **_refused(prompt_logprobs=(), return_token_ids=(False,)),
}

COUNT_TOKENS: FieldTable = {
    **_honoured("model", "messages", "system", "thinking", "chat_template_kwargs"),
    **_honoured("tools", "tool_choice", why=_TOOLS),
    **_honoured("output_config", "output_config.effort"),
    **_needs("grammar", **{"output_config.format": ()}),
    # cache_control marks prefixes to cache; the server's prefix cache needs no marks. The other fields control
    # Anthropic's billing and routing.
    **_ignored("cache_control", "context_management", "speed", "user_profile_id", "workspace_id"),
    **_refused("this server connects to no other server", mcp_servers=([],)),
    **_refused(mm_payload=("tensors", "none"), return_mm_kwargs=(False,)),
}

MESSAGES: FieldTable = {
    **COUNT_TOKENS,
    **_honoured("max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p"),
    **_honoured("cache_salt", "request_id", "add_special_tokens"),
    **_needs(priority=(0,)),
    **_ignored("metadata", "service_tier", "inference_geo", "diagnostics", "billing_policy"),
    **_refused(_NOTHING_STORED.replace("input", "messages"), container=(), thread=(), compaction=()),
    **_refused(fallbacks=([],), fallback_credit_token=(), watermarking=(False,)),
    **_refused(kv_transfer_params=(), ec_transfer_params=(), vllm_xargs=({},)),
}

_POOLED: FieldTable = {
    **_honoured("model", "add_special_tokens", "priority", "cache_salt", "request_id", "use_activation"),
    **_ignored("user"),
    **_refused("a text that is too long is refused", truncate_prompt_tokens=(), truncation_side=()),
    **_refused("the model takes text only", mm_processor_kwargs=()),
    **_refused(padding=("do_not_pad",)),
}

_INPUTS: FieldTable = {**_POOLED, **_honoured("input"), **_refused("send input", messages=())}

_VECTORS: FieldTable = {
    **_INPUTS,
    **_honoured("encoding_format"),
    **_refused("32-bit floats only", embed_dtype=("float32",), endianness=("native", "little")),
}

EMBEDDING: FieldTable = {**_VECTORS, **_honoured("dimensions", why="a model trained for it (Matryoshka)")}

POOLING: FieldTable = {
    **_VECTORS,
    **_honoured("task", why="the model's own task"),
    **_refused("send it to /v1/embeddings", dimensions=()),
}

CLASSIFICATION: FieldTable = _INPUTS

_SCORED: FieldTable = {
    **_POOLED,
    **_refused("a text that is too long is refused", max_tokens_per_query=(0,), max_tokens_per_doc=(0,)),
    **_honoured("instruction", "chat_template_kwargs", why="a cross-encoder, served with --chat-template"),
}

SCORE: FieldTable = {
    **_SCORED,
    **_honoured("queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
}

RERANK: FieldTable = {**_SCORED, **_honoured("query", "documents", "top_n")}

TABLES: dict[str, FieldTable] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/embeddings": EMBEDDING,
    "/v1/score": SCORE,
    "/v1/rerank": RERANK,
    "/pooling": POOLING,
    "/classify": CLASSIFICATION,
}
# the endpoints of models that give embeddings or labels instead of text
POOLING_PATHS = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling", "/classify")
