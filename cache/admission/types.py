"""The data types of admission: requests, limits of the KV block pool, and decisions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tonnage.cache.blocks.groups import check_groups
from tonnage.cache.errors import CacheConfigError, InvalidRequest
from tonnage.planner.model.layout import KVLayout

# One step of priority counts as this many seconds of waiting. A request whose priority is 6 steps better
# overtakes requests up to a minute older. The allowed range of -1000 to 1000 spans five and a half hours.
AGEING_SECONDS = 10.0


class AdmissionMode(StrEnum):
    """The admission mode: the rule by which waiting requests may start, as set by ``--admission-mode``."""

    GUARANTEED = "guaranteed"
    PREDICTIVE = "predictive"
    GREEDY = "greedy"
    NO_EVICT = "no_evict"
    AUTO = "auto"


class WaitReason(StrEnum):
    """The reason why a request waits for admission: the resource that it lacks."""

    BLOCKS = "blocks"
    SEQUENCES = "sequences"
    TENANT_QUOTA = "tenant_quota"


class NeverReason(StrEnum):
    """The reason why a request can never run: the limit that it exceeds even when it runs alone."""

    MAX_MODEL_LEN = "max_model_len"
    BLOCKS = "blocks"
    SEQUENCES = "sequences"
    TENANT_QUOTA = "tenant_quota"


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A request as admission sees it: its lengths, tenant and priority, without its true output length.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        max_tokens: Upper bound of output tokens per sequence.
        n: Number of sequences from the prompt.
        tenant: Name of the tenant that sent the request. It affects the queue and quotas, not the reservation.
        priority: Priority in the queue; a lower number goes first.
        produced: Number of trailing prompt tokens that are the request's own output, computed again after a
            preemption.
        weight: Weight of the tenant's key, its share of the engine relative to other keys.

    Raises:
        InvalidRequest: A count is below 1.
    """

    prompt_tokens: int
    max_tokens: int
    n: int = 1
    tenant: str = ""
    priority: int = 0
    produced: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "max_tokens", "n"):
            if (value := getattr(self, field)) < 1:
                raise InvalidRequest(f"{value} is below 1", field=field, hint="give at least 1")

    @property
    def total_tokens(self) -> int:
        """Upper bound of the tokens of one sequence: prompt plus max_tokens."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the block pool and of a step, which every reservation must respect.

    A layout without groups, such as an encoder's, stores no KV cache: only lengths and sequences are limited.

    Attributes:
        layout: KV cache groups and block size.
        usable_blocks: Blocks of the pool without the null block.
        max_model_len: Upper bound of prompt + max_tokens.
        max_num_seqs: Upper bound of live sequences.
        max_num_batched_tokens: Upper bound of the positions that one sequence computes in a step.
        cached_states: Whether recurrent states are cached with prefixes, so that a sequence may hold two.
        prefix_caching: Whether a preempted request may find its computed blocks in the prefix cache.

    Raises:
        CacheConfigError: A limit is below 1, or the groups do not fit one pool; the error names the field.
    """

    layout: KVLayout
    usable_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cached_states: bool = False
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        block_size = self.layout.block_size
        if block_size < 1:
            raise CacheConfigError(f"{block_size} is below 1", field="block_size", hint="for example 16")
        for field in ("usable_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if field == "usable_blocks" and not self.layout.groups:
                continue
            if (value := getattr(self, field)) < 1:
                raise CacheConfigError(f"{value} is below 1", field=field, hint="give at least 1")
        if self.layout.groups:
            check_groups(self.layout)


@dataclass(frozen=True, slots=True)
class Head:
    """The first request of the queue (the head), which waits for blocks, with its forecast.

    ``output_left`` is the forecast number of its output tokens, ``start`` its forecast start in steps from now.
    """

    request: AdmissionRequest
    output_left: int
    start: int


@dataclass(frozen=True, slots=True)
class Admit:
    """The decision that a request may run; ``blocks`` is the number of blocks reserved for it."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The decision that a request must wait, with the number of KV blocks or sequences that it lacks."""

    reason: WaitReason
    blocks_short: int = 0
    sequences_short: int = 0


@dataclass(frozen=True, slots=True)
class Never:
    """The decision that a request can never run, because it does not fit even when it runs alone.

    ``largest_prompt_tokens`` is the longest prompt, in tokens, that fits with the same max_tokens and n, or 0.
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
