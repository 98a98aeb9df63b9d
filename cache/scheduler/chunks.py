"""Where a chunk of a prompt ends, so that the recurrent states worth keeping are produced.

A state can be cached only where a step ends. With cached states a chunk therefore ends at a block boundary. It
also stops at the last boundary before the prompt's last token, where the same prompt can continue, and at the
*junction*, up to which another request's prompt was equal but left no state.

These are the rules of vLLM's ``_mamba_block_aligned_split`` (v1/core/sched/scheduler.py, 0.32.0 and 0.33.0) for
hashes of whole blocks. Versions 0.30 and 0.31 compute a prompt of whole blocks to its end, and have a hit there
only for longer prompts.
"""

from __future__ import annotations


def aligned_chunk(
    chunk: int, *, computed: int, length: int, prompt: int, junction: int, block_size: int, budget: int
) -> int:
    """Return how many prompt tokens to compute so that the step ends where a recurrent state can be cached.

    The result is 0 if the step has no budget for a block; the prompt then waits for the next step.

    Args:
        chunk: Tokens that the step would compute without cached states.
        computed: Tokens computed so far.
        length: Known tokens.
        prompt: Tokens of the request's own prompt.
        junction: Tokens that another prompt had in common; 0: none.
        block_size: Tokens per block.
        budget: Tokens of a whole step.
    """
    prefill_end = max(prompt, length - 1)  # after a preemption the output is recomputed too
    if computed >= prefill_end:
        return chunk
    end = computed + chunk
    if end < prefill_end:
        aligned = end // block_size * block_size
        if aligned > computed or block_size <= budget:  # otherwise a block takes several steps
            end = aligned
    stops = (
        (computed // block_size + 1) * block_size if computed % block_size else 0,
        (length - 1) // block_size * block_size,
        computed + (junction - computed) // block_size * block_size if computed < junction < end else 0,
    )
    return max(0, min((stop for stop in stops if computed < stop < end), default=end) - computed)
