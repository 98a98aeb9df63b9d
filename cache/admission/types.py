"""The values that admission reads and answers with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tonnage.cache.blocks.groups import check_groups
from tonnage.cache.errors import CacheConfigError, InvalidRequest
from tonnage.planner.model.layout import KVLayout

# Seconds of waiting that one step of priority is worth: who asks for 6 more is passed for a minute, and -1000
# to 1000, what a request may ask for, span five and a half hours.
AGEING_SECONDS = 10.0


class WaitReason(StrEnum):
    """What a request waits for."""

    BLOCKS = "blocks"
    SEQUENCES = "sequences"
    TENANT_QUOTA = "tenant_quota"


class NeverReason(StrEnum):
    """What a request exceeds even when it is alone."""

    MAX_MODEL_LEN = "max_model_len"
    BLOCKS = "blocks"
    SEQUENCES = "sequences"
    TENANT_QUOTA = "tenant_quota"


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """All that is known at submit; the true output length is not.

    ``n`` sequences of ``max_tokens`` each from one prompt. ``tenant`` and ``priority`` order the queue and do
    not change the reservation. ``produced``: how much of the prompt is its own output, computed again after a
    preemption. Raises InvalidRequest where a count is below 1.
    """

    prompt_tokens: int
    max_tokens: int
    n: int = 1
    tenant: str = ""
    priority: int = 0
    produced: int = 0

    def __post_init__(self) -> None:
        for field, value in (
            ("prompt_tokens", self.prompt_tokens),
            ("max_tokens", self.max_tokens),
            ("n", self.n),
        ):
            if value < 1:
                raise InvalidRequest(f"{value} is below 1", field=field, hint="give at least 1")

    @property
    def total_tokens(self) -> int:
        """Tokens of one sequence at its longest."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is to reserve from. ``usable_blocks`` leaves out the null block; ``max_num_batched_tokens`` is
    the most positions one sequence computes in one step; ``cached_states``: recurrent states are cached with
    prefixes, and a sequence may hold two. A layout without groups (an encoder's) stores nothing:
    there are no blocks, and only lengths and sequences limit. Raises CacheConfigError, naming the field."""

    layout: KVLayout
    usable_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cached_states: bool = False

    def __post_init__(self) -> None:
        block_size = self.layout.block_size
        if block_size < 1:
            raise CacheConfigError(f"{block_size} is below 1", field="block_size", hint="for example 16")
        for field in ("usable_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if field == "usable_blocks" and not self.layout.groups:
                continue
            if getattr(self, field) < 1:
                raise CacheConfigError(
                    f"{getattr(self, field)} is below 1", field=field, hint="give at least 1"
                )
        if self.layout.groups:
            check_groups(self.layout)


@dataclass(frozen=True, slots=True)
class Admit:
    """Run it. ``blocks`` is the reservation."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Wait:
    """It fits, but not now: so many blocks or sequences must be given back first."""

    reason: WaitReason
    blocks_short: int = 0
    sequences_short: int = 0


@dataclass(frozen=True, slots=True)
class Never:
    """It does not fit even alone.

    ``largest_prompt_tokens`` is the longest prompt that fits with the same max_tokens and n; 0: none does.
    """

    reason: NeverReason
    needed_blocks: int
    usable_blocks: int
    needed_tokens: int
    max_model_len: int
    needed_sequences: int
    max_num_seqs: int
    largest_prompt_tokens: int

    def __str__(self) -> str:
        if self.reason is NeverReason.SEQUENCES:
            return f"n = {self.needed_sequences} sequences, max_num_seqs is {self.max_num_seqs}"
        if self.reason is NeverReason.MAX_MODEL_LEN:
            need = (
                f"prompt and max_tokens need {self.needed_tokens} tokens, max_model_len is {self.max_model_len}"
            )
        else:
            holder = "a tenant may have" if self.reason is NeverReason.TENANT_QUOTA else "the pool has"
            need = f"the request needs {self.needed_blocks} KV blocks, {holder} {self.usable_blocks}"
        if self.largest_prompt_tokens:
            return f"{need}; with this max_tokens a prompt of {self.largest_prompt_tokens} tokens fits"
        lower = "max_tokens or n" if self.needed_sequences > 1 else "max_tokens"
        return f"{need}; with this max_tokens no prompt fits, lower {lower}"


Decision = Admit | Wait | Never
