"""The modes of admission, as one pure question: may this request start beside those that run?

=============== ============================================================================================
``guaranteed``  the state with it is safe (`tonnage.cache.admission.safety`), and the peak over time fits if
                everybody runs to max_tokens: no preemption ever; stalls only where chunks of prefill shift
                the peak. With ``length_quantile`` below 1 the peak is forecast by that quantile of learned
                lengths: many fewer steps, still no preemption, stalls where lengths surprise.
``predictive``  the peak forecast by the learned lengths fits under the watermark. Sequences stall when
                blocks run out; only when nobody can go on is one preempted, the one with the least to redo.
``greedy``      the prompt fits now (vLLM 0.32, ``scheduler_reserve_full_isl``); the youngest is preempted.
``no_evict``    the sum of all reservations fits (TensorRT-LLM's GUARANTEED_NO_EVICT, mini-sglang).
=============== ============================================================================================

Nothing here sees the true output length.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.passing import Head, with_head
from tonnage.cache.admission.peak import Growth, growth_of, peak_of
from tonnage.cache.admission.reservation import refusal, split_reservation
from tonnage.cache.admission.safety import finishing_order, slack_of
from tonnage.cache.admission.snapshot import Int32Array, RunningSnapshot
from tonnage.cache.admission.types import AdmissionRequest, Admit, Decision, Limits, Never, Wait, WaitReason
from tonnage.cache.blocks.groups import num_full
from tonnage.cache.errors import CacheConfigError

IntArray = npt.NDArray[np.integer]


class AdmissionMode(StrEnum):
    """``--admission-mode``."""

    GUARANTEED = "guaranteed"
    PREDICTIVE = "predictive"
    GREEDY = "greedy"
    NO_EVICT = "no_evict"


@dataclass(frozen=True, slots=True)
class Policy:
    """``length_quantile`` and ``watermark`` None: the mode's own.

    The watermark is a share of the usable blocks that admission leaves free for growth, as vLLM's
    ``--watermark``. Raises CacheConfigError, naming the field.
    """

    mode: AdmissionMode = AdmissionMode.GUARANTEED
    length_quantile: float | None = None
    watermark: float | None = None
    tenant_blocks: int | None = None  # most blocks reserved to one tenant at a time

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1:
            raise CacheConfigError(f"{self.watermark} is not in [0, 1)", field="watermark", hint="0.01 is 1 %")
        if not 0 < self.quantile <= 1:
            raise CacheConfigError(f"{self.length_quantile} is not in (0, 1]", field="length_quantile")
        if self.tenant_blocks is not None and self.tenant_blocks < 1:
            raise CacheConfigError(f"{self.tenant_blocks} is below 1", field="tenant_blocks")

    @property
    def quantile(self) -> float:
        """Quantile of the outputs still to come that the peak is forecast from; 1 is max_tokens.

        0.4 with a watermark of 0.004: benchmarks/admission.py, where 0.4 to 0.5 and 0 to 0.005 differ by 0.4 %
        of the steps and by up to 4 preemptions in 2,000 requests.
        """
        if self.length_quantile is not None:
            return self.length_quantile
        return 0.4 if self.mode is AdmissionMode.PREDICTIVE else 1.0

    @property
    def reserve(self) -> float:
        """Share of the usable blocks that a new request must leave."""
        if self.watermark is not None:
            return self.watermark
        return 0.004 if self.mode is AdmissionMode.PREDICTIVE else 0.0

    @property
    def lookahead(self) -> int:
        """How many waiting requests behind the head are asked whether they may pass.

        Worth it where the start of the head is sure: against learned lengths passing cost 0.4 % more steps and
        3 preemptions in benchmarks/admission.py (``--lookahead 8``), and vLLM's rule lets nobody pass.
        """
        return 8 if self.quantile == 1 and self.mode is AdmissionMode.GUARANTEED else 0

    @property
    def safe(self) -> bool:
        """Whether only safe states are allowed: blocks are granted by `safety.grant`, nobody is preempted."""
        return self.mode is AdmissionMode.GUARANTEED


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request as it would enter: its reservation, its prefix hit, and how long its output is forecast to be.

    ``hit_used`` blocks (full groups) are referenced by others, ``hit_cached`` by nobody: these cost capacity as
    an allocation does. ``private_lost`` int32 [running]: blocks of the hit that each running request had to
    itself; None where the hit touches none. ``output`` is what it has produced before it was preempted.
    ``tenant_reserved``: blocks reserved to its tenant's running requests.
    """

    request: AdmissionRequest
    output_left: int
    hit_used: int = 0
    hit_cached: int = 0
    private_lost: Int32Array | None = None
    tenant_reserved: int = 0


def decide_running(
    new: Newcomer,
    snapshot: RunningSnapshot,
    output_left: IntArray,
    limits: Limits,
    policy: Policy,
    head: Head | None = None,
) -> Decision:
    """Admit now, wait or never; changes nothing. O(running * 16), some tens of microseconds at 256.

    ``output_left`` [running]: tokens forecast for each running request (its longest sequence), by
    `forecast.LengthForecast` at ``policy.quantile``. With ``head`` the newcomer stands behind it and passes
    only if the head's start is not delayed.
    """
    request = new.request
    never = _refusal(new, limits, policy)
    if never is not None:
        return never
    full, sliding = split_reservation(request, limits)
    running = int(snapshot.sequences.sum())
    sequences_short = running + request.n - limits.max_num_seqs
    if sequences_short > 0:
        return Wait(WaitReason.SEQUENCES, 0, sequences_short)
    if policy.tenant_blocks is not None:
        short = new.tenant_reserved + full + sliding - policy.tenant_blocks
        if short > 0:
            return Wait(WaitReason.TENANT_QUOTA, short)
    if len(snapshot) == 0:  # refusal() has said that it fits alone
        return Admit(full + sliding)
    short = _blocks_short(new, full, sliding, snapshot, output_left, limits, policy, head)
    if short > 0:
        return Wait(WaitReason.BLOCKS, short, 0, _steps_until(short, snapshot, output_left))
    return Admit(full + sliding)


def _refusal(new: Newcomer, limits: Limits, policy: Policy) -> Never | None:
    never = refusal(new.request, limits)
    if never is None and policy.tenant_blocks is not None:
        return refusal(new.request, limits, tenant_blocks=policy.tenant_blocks)
    return never


def _blocks_short(
    new: Newcomer,
    full: int,
    sliding: int,
    snapshot: RunningSnapshot,
    output_left: IntArray,
    limits: Limits,
    policy: Policy,
    head: Head | None,
) -> int:
    """Blocks missing by the mode's rule; 0 or less: it fits."""
    margin = int(policy.reserve * limits.usable_blocks)
    capacity = snapshot.capacity - sliding - margin
    block_size, groups = limits.layout.block_size, num_full(limits.layout)
    prompt_blocks = -(-new.request.prompt_tokens // block_size) * groups
    if head is not None and (groups == 0 or policy.mode in (AdmissionMode.GREEDY, AdmissionMode.NO_EVICT)):
        return 1  # first come first served
    if groups == 0:  # a window stops growing: what all can hold is set aside, and the sum is the peak
        return -capacity
    if policy.mode is AdmissionMode.NO_EVICT:
        return int(snapshot.reserved.sum()) + full - capacity
    # Prompts admitted before it take theirs first; what a chunk of this step has taken is held already.
    prompts = -(-snapshot.prompt.astype(np.int64) // block_size) * groups
    waiting = int(np.maximum(prompts - snapshot.held, 0).sum())
    short = snapshot.used + waiting + prompt_blocks - new.hit_used - capacity
    if policy.mode is AdmissionMode.GREEDY or short > 0:
        return short
    growth = growth_of(snapshot, output_left, block_size, limits.max_num_batched_tokens, groups)
    growth = _with_newcomer(growth, new, snapshot, limits, groups)
    common = snapshot.used - int(snapshot.private.sum())
    if new.private_lost is not None:  # these are shared from now on
        lost = int(new.private_lost.sum())
        common += lost
        growth.fixed[:-1] -= new.private_lost // groups
    short = common + groups * peak_of(growth, block_size) - capacity
    if short <= 0 and head is not None:
        growth = with_head(growth, head, block_size)
        short = common + groups * peak_of(growth, block_size, head.start) - capacity
    if short <= 0 and policy.safe:
        short = _unsafe_by(new, full, sliding, snapshot)
    return short


def _with_newcomer(
    growth: Growth, new: Newcomer, snapshot: RunningSnapshot, limits: Limits, groups: int
) -> Growth:
    request, block_size = new.request, limits.layout.block_size
    left = request.prompt_tokens - (new.hit_used + new.hit_cached) // groups * block_size
    steps = -(-(left + int(snapshot.prompt_left.sum())) // limits.max_num_batched_tokens)
    # With whole prompts in one step, that step gives the first token too: it is counted with the decodes.
    end = new.output_left + (steps if steps > 1 else 0)
    fixed = request.prompt_tokens // block_size - new.hit_used // groups
    return growth.with_one(fixed, request.prompt_tokens % block_size, request.n, end)


def _unsafe_by(new: Newcomer, full: int, sliding: int, snapshot: RunningSnapshot) -> int:
    """Blocks missing for the state with the newcomer to be safe."""
    private = snapshot.private if new.private_lost is None else snapshot.private - new.private_lost
    need = np.append(snapshot.need, full - new.hit_used - new.hit_cached)
    back = np.append(private, new.hit_cached)
    available = snapshot.available - sliding - new.hit_cached
    return -int(slack_of(finishing_order(need, back), available, need, back).min())


def _steps_until(short: int, snapshot: RunningSnapshot, output_left: IntArray) -> int:
    """Steps until the requests that end first have given back so many blocks, if all ends as forecast."""
    order = np.argsort(output_left)
    given = np.cumsum(snapshot.private[order])
    at = int(np.searchsorted(given, short))
    return int(output_left[order[min(at, len(order) - 1)]])


def victim(snapshot: RunningSnapshot, candidates: IntArray, mode: AdmissionMode) -> int:
    """Which of the running requests (indices) to preempt when nobody can go on.

    Predictive: the one with the fewest computed tokens to redo; among equals the youngest. Greedy: the
    youngest, as vLLM does first come first served.
    """
    if mode is AdmissionMode.GREEDY:
        return int(max(candidates))
    computed = snapshot.prompt - snapshot.prompt_left + snapshot.output
    lost = computed[candidates].astype(np.int64) - np.asarray(candidates) / (1 + len(snapshot))
    return int(candidates[int(np.argmin(lost))])
