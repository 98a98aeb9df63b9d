"""Where a chunk of a prompt ends so that the recurrent states worth keeping are made.

A state can be cached only where a step ended. With cached states a chunk therefore ends at a block border, and
stops at the last one before the prompt's last token, where the same prompt will go on, and at the *junction* up
to which another request's prompt was the same but left no state. These are the rules of vLLM's
``_mamba_block_aligned_split`` (v1/core/sched/scheduler.py, 0.32.0 and 0.33.0) for hashes of whole blocks. (0.30
and 0.31 take a prompt of whole blocks to its end: they have a hit there for longer prompts only.)
"""

from __future__ import annotations


def aligned_chunk(
    chunk: int, *, computed: int, length: int, prompt: int, junction: int, block_size: int, budget: int
) -> int:
    """Tokens of a prompt's chunk, ``chunk`` without the rule; 0: it waits for a step with room for a block.

    ``length`` tokens are known, ``prompt`` of them the request's own; ``budget``: tokens of a whole step.
    """
    prefill_end = max(prompt, length - 1)  # after a preemption its output is computed again, too
    if computed >= prefill_end:
        return chunk
    end = computed + chunk
    if end < prefill_end:
        aligned = end // block_size * block_size
        if aligned > computed or block_size <= budget:  # else a block takes several steps
            end = aligned
    stops = (
        (computed // block_size + 1) * block_size if computed % block_size else 0,
        (length - 1) // block_size * block_size,
        computed + (junction - computed) // block_size * block_size if computed < junction < end else 0,
    )
    return max(0, min((stop for stop in stops if computed < stop < end), default=end) - computed)
