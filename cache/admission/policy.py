"""The modes of admission: what must hold of the state with a new request for it to start.

=============== ============================================================================================
``guaranteed``  the state with it is safe (`tonnage.cache.admission.safety`), and the peak forecast by the
learned
                lengths fits beside what that law keeps free: no preemption ever, steps skipped where lengths
                surprise. With ``length_quantile`` 1 the forecast is max_tokens: no steps skipped either, but
                where chunks of prefill shift the peak, and far fewer requests at a time.
``predictive``  the peak forecast by the learned lengths fits under the watermark. Sequences stall when
                blocks run out; only when nobody can go on is one preempted, the one with the least to redo.
``greedy``      the prompt fits now (vLLM 0.32, ``scheduler_reserve_full_isl``); the youngest is preempted.
``no_evict``    the sum of all reservations fits (TensorRT-LLM's GUARANTEED_NO_EVICT, mini-sglang).
``auto``        greedy, or predictive by another quantile where a rehearsal shows that it serves the load better
                (`tonnage.cache.admission.auto`).
=============== ============================================================================================

Everywhere a request may start that runs alone or whose reservation fits beside all others
(`tonnage.cache.admission.controller`). Nothing here sees the true output length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tonnage.cache.admission.passing import Head, with_head
from tonnage.cache.admission.peak import growth_of, peak_of, prompts_missing
from tonnage.cache.admission.safety import IntArray, committed_peak
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.admission.types import Limits
from tonnage.cache.blocks.groups import num_full
from tonnage.cache.errors import CacheConfigError


class AdmissionMode(StrEnum):
    """``--admission-mode``."""

    GUARANTEED = "guaranteed"
    PREDICTIVE = "predictive"
    GREEDY = "greedy"
    NO_EVICT = "no_evict"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Rule:
    """What ``auto`` admits by now. ``share`` None is vLLM's rule: a request starts when its prompt fits.

    Else a request starts only if the pool's peak fits, with each running request forecast to end where this
    share of the longer outputs still runs. ``fresh`` False: that is asked of preempted requests alone.
    """

    share: float | None = None
    fresh: bool = True


VLLM = Rule()


@dataclass(frozen=True, slots=True)
class Policy:
    """``length_quantile`` and ``watermark`` None: the mode's own.

    ``target_itl``: P99 of the seconds between tokens that ``auto`` keeps below, at the price of throughput. The
    watermark is a share of the usable blocks that admission leaves free for growth, as vLLM's
    ``--watermark``. Raises CacheConfigError, naming the field.
    """

    mode: AdmissionMode = AdmissionMode.GUARANTEED
    length_quantile: float | None = None
    watermark: float | None = None
    tenant_blocks: int | None = None  # most blocks reserved to one tenant at a time
    target_itl: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1:
            raise CacheConfigError(f"{self.watermark} is not in [0, 1)", field="watermark", hint="0.01 is 1 %")
        if not 0 < self.quantile <= 1:
            raise CacheConfigError(f"{self.length_quantile} is not in (0, 1]", field="length_quantile")
        if self.length_quantile is not None and not self.forecasts:
            raise CacheConfigError(
                f"means nothing to {self.mode}, which forecasts no lengths", field="length_quantile",
                hint="guaranteed and predictive do",
            )  # fmt: skip
        if self.target_itl is not None and self.mode is not AdmissionMode.AUTO:
            raise CacheConfigError(
                f"means nothing to {self.mode}", field="target_itl", hint="--admission-mode auto has it"
            )
        if self.target_itl is not None and not 0 < self.target_itl < float("inf"):
            raise CacheConfigError(
                f"{self.target_itl} s is not a time", field="target_itl", hint="for example 100ms"
            )
        if self.mode is AdmissionMode.AUTO and self.watermark is not None:
            raise CacheConfigError(
                "means nothing to auto, which weighs idle blocks against preemptions", field="watermark",
                hint="leave it out, or --admission-mode predictive",
            )  # fmt: skip
        if self.tenant_blocks is not None and self.tenant_blocks < 1:
            raise CacheConfigError(f"{self.tenant_blocks} is below 1", field="tenant_blocks")

    @property
    def quantile(self) -> float:
        """Quantile of the outputs still to come that the peak is forecast from; 1 is max_tokens.

        Predictive: 0.4 with a watermark of 0.004 (benchmarks/admission.py, where 0.4 to 0.5 and 0 to 0.005
        differ by 0.4 % of the steps and by up to 4 preemptions in 2,000 requests). Guaranteed: 0.5; below it
        more requests start than may grow, and tokens/s fall (benchmarks/vllm_admission.py --matrix --modes
        guaranteed).
        """
        if self.length_quantile is not None:
            return self.length_quantile
        return {AdmissionMode.PREDICTIVE: 0.4, AdmissionMode.GUARANTEED: 0.5}.get(self.mode, 1.0)

    @property
    def cautious(self) -> bool:
        """Whether the quantile is meant for many requests, and fewer are forecast by a higher one
        (`tonnage.cache.admission.forecast`): unless the user named it."""
        return self.length_quantile is None and self.forecasts

    @property
    def reserve(self) -> float:
        """Share of the usable blocks that a new request must leave."""
        if self.watermark is not None:
            return self.watermark
        return 0.004 if self.mode is AdmissionMode.PREDICTIVE else 0.0

    @property
    def lookahead(self) -> int:
        """How many waiting requests behind the head are asked whether they may pass.

        In guaranteed mode passing saves 1.3 % of the steps and nearly all skipped ones of
        benchmarks/admission.py; in predictive mode it cost 0.4 % more steps and 3 preemptions, and vLLM's rule
        lets no request pass.
        """
        return 8 if self.mode is AdmissionMode.GUARANTEED else 0

    @property
    def forecasts(self) -> bool:
        """Whether the mode looks at blocks over time. Where not, nobody passes the head of the queue."""
        return self.mode in (AdmissionMode.GUARANTEED, AdmissionMode.PREDICTIVE)

    def under(self, rule: Rule) -> Policy:
        """Return the mode of its own that ``auto`` is while ``rule`` holds."""
        if rule == VLLM:
            return Policy(AdmissionMode.GREEDY, tenant_blocks=self.tenant_blocks)
        assert rule.share is not None
        return Policy(AdmissionMode.PREDICTIVE, 1 - rule.share, 0.0, self.tenant_blocks)

    def margin(self, limits: Limits) -> int:
        """Blocks that a new request must leave."""
        return int(self.reserve * limits.usable_blocks)


def blocks_taken(
    state: RunningSnapshot, output_left: IntArray, limits: Limits, policy: Policy, head: Head | None = None
) -> Iterator[int]:
    """Blocks of all groups that count as taken with everybody in ``state``, by each rule of the mode, the cheap
    one first: each must leave the margin. For layouts with a full group, in every mode but ``no_evict``.

    ``output_left`` [running]: tokens forecast for each request (its longest sequence), by
    `forecast.LengthForecast` at ``policy.quantile``. ``head``: the request that the last one of ``state`` would
    pass, which must not delay it. O(running * 16), some tens of microseconds at 256.
    """
    block_size, groups = limits.layout.block_size, num_full(limits.layout)
    # Prompts admitted before it take theirs first; what a chunk of this step has taken is held already.
    yield state.windowed + state.used + prompts_missing(state, block_size, groups)
    if not policy.forecasts:
        return
    growth = growth_of(state, output_left, block_size, limits.max_num_batched_tokens, groups)
    common = state.windowed + state.used - growth.private
    if policy.mode is AdmissionMode.GUARANTEED:
        common += kept_for_one(state, output_left, block_size, groups)
    yield common + groups * peak_of(growth, block_size)
    if head is not None:
        yield common + groups * peak_of(with_head(growth, head, block_size), block_size, head.start)


def kept_for_one(state: RunningSnapshot, output_left: IntArray, block_size: int, groups: int) -> int:
    """Return the blocks that guaranteed mode keeps beside the forecast peak, so that its law lets all grow.

    The law (`tonnage.cache.admission.safety`) holds back what one request may need beyond its forecast,
    whichever needs least: with less than that available, one request grows at a time and all others skip their
    steps.

    Args:
        state: the requests.
        output_left: int [running], tokens forecast for each.
        block_size: tokens of a block.
        groups: full groups.
    """
    if not len(state):
        return 0
    beyond = -(-(state.output_left - output_left) // block_size) * state.sequences * groups
    return max(0, int(beyond.min()))


def blocks_short(
    state: RunningSnapshot, output_left: IntArray, limits: Limits, policy: Policy, head: Head | None = None
) -> int:
    """Blocks that must come back before the last request of ``state`` may start; 0: it may start now.

    Arguments as `blocks_taken`. In guaranteed mode ``state`` must be safe, too.
    """
    room = limits.usable_blocks - policy.margin(limits)
    for taken in blocks_taken(state, output_left, limits, policy, head):
        if taken > room:
            return taken - room
    if policy.mode is AdmissionMode.GUARANTEED:
        return max(0, committed_peak(state) - state.capacity)
    return 0
