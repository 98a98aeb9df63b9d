"""The input of an engine: a request with token ids of the prompt and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.server.engines.packed import TokenBiases, TokenIds
from tonnage.server.text.grammar import Grammar

# Tasks of a model that generates no text, with vLLM's names. The result for a prompt is one embedding, the
# scores of the labels, or the scores of the labels for each token.
PoolingTask = Literal["embed", "classify", "token_classify"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """Parameters of a request for an embedding or for scores of labels instead of generated tokens.

    Attributes:
        dimensions: number of components to which an embedding is truncated before it is normalized again; None
            for no truncation. The model must be trained for truncation (Matryoshka).
        use_activation: whether an embedding is normalized, or a classifier's logits pass sigmoid or softmax;
            None for the model's default.
        second_text: index of the first token of the second of two texts; None for a single text, and for a
            model without token types.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    second_text: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with vLLM's meanings: temperature 0 is greedy, and top_k 0 means no top_k.

    The API rejects a parameter that the engine does not support (``Capabilities.honours``).

    Attributes:
        logprobs: number of likeliest tokens to report at each output position, with their log probabilities and
            that of the output token. These are the values before temperature and truncation (vLLM's
            ``raw_logprobs``). None for no log probabilities.
        prompt_logprobs: number of likeliest tokens to report at each prompt position, as with ``logprobs``.
        logit_bias: pairs (token id, value added to its logit).
        allowed_token_ids: the tokens that may be drawn; empty for all tokens.
        bad_words: texts that the output must not contain.
        bad_token_ids: the token ids of ``bad_words``, one or two sequences for each; the API sets them.
        min_tokens: number of output tokens before which no stop token is drawn.
        pooling: parameters of a pooling request; None for text generation. A pooling request needs an engine
            with ``Capabilities.pools``.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # the API adds the model's EOS ids, unless ignore_eos is set
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] | TokenBiases = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    pooling: Pooling | None = None
    allowed_token_ids: tuple[int, ...] | TokenIds = ()
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...] | TokenIds, ...] = ()


# Names of the sampling parameters that every engine supports. An engine's ``Capabilities`` name further ones.
BASIC_PARAMS = frozenset({"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids"})
# Names of the parameters that the hf engine and vLLM support; ``grammar`` needs the package llguidance.
ALL_PARAMS = BASIC_PARAMS | {
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "grammar",
    "priority",
}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for ``n`` output sequences from one prompt.

    ``request_id`` is unique among the requests in flight. ``weight`` is the weight of the tenant's API key
    relative to other API keys. ``lora`` is the name of the LoRA adapter; empty means the base model.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    weight: float = 1.0
    lora: str = ""
