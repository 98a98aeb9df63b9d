"""What an engine is asked: a prompt of token ids and how to answer it."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.server.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Pooling:
    """Asks for the embedding of the prompt. ``dimensions``: the first so many, normalized again, of a model
    that was trained for it."""

    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Field meanings as in vLLM's SamplingParams. temperature 0 = greedy; top_k 0 = off.

    ``logprobs``: with each token its own log probability and those of this many best ones (before temperature
    and truncation, vLLM's ``raw_logprobs``); ``prompt_logprobs`` the same for the prompt, None: none.
    ``logit_bias``: (token id, added to its logit). ``min_tokens``: no stop token before so many tokens.
    ``pooling``: a vector instead of tokens, by an engine that ``embeds``.
    What an engine does not honour (``Capabilities.honours``) is refused before it gets there.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # the model's EOS ids included, unless ignore_eos
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    pooling: Pooling | None = None


# The sampling parameters every engine honours; what one honours beyond them is in its ``Capabilities``.
BASIC_PARAMS = frozenset({"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids"})


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``n`` sequences from one prompt; ``request_id`` unique among the live ones. ``lora``: name of the
    adapter, empty for the model itself."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    lora: str = ""
