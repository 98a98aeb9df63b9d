"""The lengths of prefill chunks: a budget divided among API keys, and ends where states can be cached.

A recurrent state can be cached only where a step ends. A chunk therefore ends at a block boundary. One chunk
ends at the last boundary before the prompt's last token, where a later request with the same prompt can
continue. One ends at the *junction*: the end of a prefix that is cached in full-attention groups, but without a
state.

These are the rules of vLLM's ``_mamba_block_aligned_split`` (v1/core/sched/scheduler.py, 0.32.0 and 0.33.0) for
hashes of whole blocks. In versions 0.30 and 0.31, the last chunk of a prompt of whole blocks ends at the
prompt's end, so only longer prompts can reuse the state that is cached there.
"""

from __future__ import annotations

from collections.abc import Mapping


def aligned_chunk(
    chunk: int, *, computed: int, length: int, prompt: int, junction: int, block_size: int, budget: int
) -> int:
    """Return how many prompt tokens to compute so that the chunk ends where a recurrent state can be cached.

    The result is 0 if ``chunk`` reaches neither the next block boundary nor the end of the prefill. The prompt
    then waits for a step with more tokens left. If ``budget`` is less than a block, the chunk may end within a
    block instead.

    Args:
        chunk: Prompt tokens that the step would compute if no recurrent states were cached.
        computed: Tokens computed so far.
        length: Known tokens of the sequence, prompt and output.
        prompt: Prompt tokens of the request, without output recomputed after a preemption.
        junction: Length of a prefix that is cached without a recurrent state at its end; 0: none.
        block_size: Tokens per block.
        budget: Token budget of a whole step.
    """
    # after a preemption the output so far is computed again like a prompt
    prefill_end = max(prompt, length - 1)
    if computed >= prefill_end:
        return chunk
    end = computed + chunk
    if end < prefill_end:
        aligned = end // block_size * block_size
        # if the budget of a whole step is less than a block, a block takes several steps
        if aligned > computed or block_size <= budget:
            end = aligned
    stops = (
        (computed // block_size + 1) * block_size if computed % block_size else 0,
        (length - 1) // block_size * block_size,
        computed + (junction - computed) // block_size * block_size if computed < junction < end else 0,
    )
    return max(0, min((stop for stop in stops if computed < stop < end), default=end) - computed)


def divided(budget: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Divide a step's token budget for prompts among API keys by max-min fairness; return tokens by key.

    No key gets more than it can use, and the tokens that it leaves are divided among the other keys.

    Args:
        budget: Tokens to divide.
        wanted: Prompt tokens that each key could compute.
    """
    found: dict[str, int] = {}
    for at, (key, tokens) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        found[key] = min(tokens, -(-budget // (len(wanted) - at)))
        budget -= found[key]
    return found
