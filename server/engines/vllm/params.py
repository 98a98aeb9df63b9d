"""Conversion of sampling parameters to vLLM's, and of vLLM's log probabilities to ours.

Written against vLLM 0.32. vLLM is optional, so it is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.engines.request import BASIC_PARAMS, GenerationRequest
from tonnage.server.engines.vllm.checked_grammar import CheckedGrammar

HONOURED = BASIC_PARAMS | {
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "grammar",
    "priority",
}


def sampling_params(request: GenerationRequest, checked: CheckedGrammar | None) -> Any:
    """Return vLLM's SamplingParams for a request and its grammar, with one token-id output for each step."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # vLLM is optional

    params = request.params
    return SamplingParams(
        n=1 if params.temperature == 0 else request.n,  # vLLM refuses n greedy sequences (VLLMEngine._chunks)
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=list(params.stop_token_ids),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        structured_outputs=_structured(checked),
        ignore_eos=True,  # the model's EOS ids are among stop_token_ids where they count
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def pooling_params(request: GenerationRequest) -> Any:
    """Return vLLM's PoolingParams for an embedding request."""
    from vllm.pooling_params import PoolingParams  # vLLM is optional

    pooling = request.params.pooling
    return PoolingParams(task="embed", dimensions=None if pooling is None else pooling.dimensions)


def _structured(checked: CheckedGrammar | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams  # vLLM is optional

    if checked is None:
        return None
    if checked.grammar.kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=checked.encode())
    return StructuredOutputsParams(grammar=checked.encode())


def token_logprobs(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Any]] | None, top: int | None
) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of each output token with the `top` most likely alternatives.

    Args:
        token_ids: the output tokens.
        positions: vLLM's dict of token id to (logprob, rank) for each token, the token's own included.
        top: number of alternatives, None when log probabilities were not requested.
    """
    if top is None or not positions:
        return ()
    return tuple(_position(token, position, top) for token, position in zip(token_ids, positions, strict=False))


def prompt_logprobs(
    prompt: Sequence[int], positions: Sequence[Mapping[int, Any] | None] | None, top: int | None
) -> tuple[TokenLogprobs | None, ...]:
    """Return the log probabilities of each prompt token, None where vLLM has none (the first token)."""
    if top is None or not positions:
        return ()
    return tuple(
        None if position is None else _position(token, position, top)
        for token, position in zip(prompt, positions, strict=False)
    )


def _position(token: int, position: Mapping[int, Any], top: int) -> TokenLogprobs:
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    best = tuple((other, float(entry.logprob)) for other, entry in ranked[:top])
    return TokenLogprobs(token, float(position[token].logprob), best)
