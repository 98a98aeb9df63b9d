"""Conversion of sampling parameters to vLLM's classes, and of vLLM's log probabilities to ours.

Written against vLLM 0.32. vLLM is optional, so it is imported only inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.engines.request import GenerationRequest, Pooling, PoolingTask
from tonnage.server.engines.vllm.checked_grammar import CheckedGrammar

# Names of entries in a request's `extra_args` (vLLM's `vllm_xargs`): the API key that sent the request, the
# key's weight, and the request's priority.
KEY, WEIGHT, PRIORITY = "tonnage_key", "tonnage_weight", "tonnage_priority"


def sampling_params(request: GenerationRequest, checked: CheckedGrammar | None) -> Any:
    """Return vLLM's SamplingParams for a request and its checked grammar, if any.

    With these parameters, vLLM returns token ids, in one output per step.
    """
    # Imported here, because vLLM is optional.
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = request.params
    return SamplingParams(
        # vLLM rejects n > 1 greedy sequences, so OutputConverter copies one.
        n=1 if params.temperature == 0 else request.n,
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
        allowed_token_ids=list(params.allowed_token_ids) or None,
        # vLLM converts bad_words to the same token ids as our tokenizer
        bad_words=list(params.bad_words) or None,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        structured_outputs=_structured(checked),
        ignore_eos=True,  # the model's EOS ids are in stop_token_ids if they should end the output
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={KEY: request.tenant, WEIGHT: request.weight, PRIORITY: request.priority}
        if request.tenant
        else None,
    )


def pooling_params(request: GenerationRequest, task: PoolingTask) -> Any:
    """Return vLLM's PoolingParams for a request to a model that does ``task``."""
    from vllm.pooling_params import PoolingParams  # imported here, because vLLM is optional

    pooling = request.params.pooling or Pooling()
    # vLLM's scoring endpoint passes token type ids under the same key (CrossEncoderIOProcessor.render in
    # entrypoints/pooling/scoring/io_processor.py, 0.32).
    types = None if pooling.second_text is None else {"compressed_token_type_ids": pooling.second_text}
    return PoolingParams(
        task=task,
        dimensions=pooling.dimensions,
        use_activation=pooling.use_activation,
        extra_kwargs=types,
    )


def _structured(checked: CheckedGrammar | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams  # imported here, because vLLM is optional

    if checked is None:
        return None
    if checked.grammar.kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=checked.encode())
    return StructuredOutputsParams(grammar=checked.encode())


def token_logprobs(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Any]] | None, top: int | None
) -> tuple[TokenLogprobs, ...]:
    """Return the log probability of each output token, with the `top` most likely alternatives.

    Args:
        token_ids: the output tokens.
        positions: for each output token, vLLM's dict from token id to (logprob, rank), which includes the
            output token.
        top: number of alternatives; None if log probabilities were not requested.
    """
    if top is None or not positions:
        return ()
    return tuple(_position(token, position, top) for token, position in zip(token_ids, positions, strict=False))


def prompt_logprobs(
    prompt: Sequence[int], positions: Sequence[Mapping[int, Any] | None] | None, top: int | None
) -> tuple[TokenLogprobs | None, ...]:
    """Return the log probability of each prompt token; None where vLLM has none, as for the first token.

    Args:
        prompt: the prompt tokens.
        positions: for each prompt token, vLLM's dict from token id to (logprob, rank), or None.
        top: number of most likely alternatives to return; None if log probabilities were not requested.
    """
    if top is None or not positions:
        return ()
    return tuple(
        None if position is None else _position(token, position, top)
        for token, position in zip(prompt, positions, strict=False)
    )


def _position(token: int, position: Mapping[int, Any], top: int) -> TokenLogprobs:
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    best = tuple((other, float(entry.logprob)) for other, entry in ranked[:top])
    drawn = position[token]
    return TokenLogprobs(token, float(drawn.logprob), best, drawn.rank)
