"""The modes of admission: the condition under which each mode lets a waiting request start.

=============== ============================================================================================
``guaranteed``  the state with the new request is safe (`tonnage.cache.admission.safety`), and the peak of
                blocks, forecast by learned lengths, leaves the blocks free that one request may need beyond its
                forecast. Requests are never preempted; they skip steps if lengths deviate. With
                ``length_quantile`` 1 the forecast is max_tokens: steps are skipped only if prefill chunks shift
                the peak, and far fewer requests run.
``predictive``  the peak of blocks, forecast by learned lengths, fits under the watermark. Sequences stall when
                blocks run out; if all stall, the request with the least to recompute is preempted.
``greedy``      the prompt fits now (vLLM 0.32, ``scheduler_reserve_full_isl``); the youngest request is
                preempted when blocks run out.
``no_evict``    the sum of all reservations fits (TensorRT-LLM's GUARANTEED_NO_EVICT, mini-sglang).
``auto``        greedy, or predictive with another quantile if a simulation shows that it serves the load better
                (`tonnage.cache.admission.auto`).
=============== ============================================================================================

In every mode a request may also start if no other request runs, or if its reservation fits beside all others
(`tonnage.cache.admission.decide`). No rule sees the true output length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tonnage.cache.admission.outlook import Newcomer, Outlook
from tonnage.cache.admission.passing import added_head
from tonnage.cache.admission.peak import Added, peak_of
from tonnage.cache.admission.snapshot import PRIVATE, PROMPT_LEFT, RunningSnapshot
from tonnage.cache.admission.types import AdmissionMode, Head, Limits
from tonnage.cache.blocks.groups import num_full
from tonnage.cache.errors import CacheConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """An admission rule that mode ``auto`` can follow.

    Attributes:
        share: None is vLLM's rule: a request starts when its prompt fits. With a number, a request waits until
            the forecast peak of blocks fits the pool. The number sets how long outputs are forecast to be: of
            the outputs that reach a running request's present length, this share is longer than its forecast.
    """

    share: float | None = None


VLLM = Rule()


@dataclass(frozen=True, slots=True)
class Policy:
    """An admission mode with its parameters; a parameter None stands for the mode's default.

    Attributes:
        mode: The admission mode.
        length_quantile: Quantile of remaining output lengths from which the peak of blocks is forecast.
        watermark: Share of the usable blocks that admission leaves free for growth, as vLLM's ``--watermark``.
        tenant_blocks: Upper bound of the blocks reserved for one tenant at a time.
        target_itl: P99 of the seconds between tokens that mode ``auto`` must keep, at the price of throughput.
        keys: Number of API keys that share the engine (`tonnage.cache.admission.shares`).

    Raises:
        CacheConfigError: A value is out of range or has no effect in the mode.
    """

    mode: AdmissionMode = AdmissionMode.GUARANTEED
    length_quantile: float | None = None
    watermark: float | None = None
    tenant_blocks: int | None = None
    target_itl: float | None = None
    keys: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1:
            raise CacheConfigError(f"{self.watermark} is not in [0, 1)", field="watermark", hint="0.01 is 1 %")
        if not 0 < self.quantile <= 1:
            raise CacheConfigError(
                f"{self.length_quantile} is not in (0, 1]", field="length_quantile", hint="0.5 is the median"
            )
        if self.length_quantile is not None and not self.forecasts:
            raise CacheConfigError(
                f"has no effect in mode {self.mode}, which forecasts no lengths", field="length_quantile",
                hint="use it with guaranteed or predictive",
            )  # fmt: skip
        if self.target_itl is not None and self.mode is not AdmissionMode.AUTO:
            raise CacheConfigError(
                f"has no effect in mode {self.mode}", field="target_itl", hint="use --admission-mode auto"
            )
        if self.target_itl is not None and not 0 < self.target_itl < float("inf"):
            raise CacheConfigError(
                f"{self.target_itl} s is no finite time above 0", field="target_itl", hint="for example 100ms"
            )
        if self.mode is AdmissionMode.AUTO and self.watermark is not None:
            raise CacheConfigError(
                "has no effect in mode auto, which weighs idle blocks against preemptions", field="watermark",
                hint="omit --watermark, or use --admission-mode predictive",
            )  # fmt: skip
        if self.tenant_blocks is not None and self.tenant_blocks < 1:
            raise CacheConfigError(
                f"{self.tenant_blocks} is below 1", field="tenant_blocks", hint="give at least 1"
            )
        if self.keys < 1:
            raise CacheConfigError(f"{self.keys} is below 1", field="keys", hint="give at least 1")

    @property
    def quantile(self) -> float:
        """Quantile of remaining output lengths from which the peak of blocks is forecast; 1 means max_tokens.

        The default of predictive mode is 0.4, with a watermark of 0.004. benchmarks/admission.py was run with
        quantiles of 0.4 to 0.5 and watermarks of 0 to 0.005. The runs differ by 0.4 % of the steps and by up to
        4 preemptions in 2,000 requests. The default of guaranteed mode is 0.5. Below it more requests start
        than can grow, and tokens/s fall (benchmarks/vllm_admission.py --matrix --modes guaranteed).
        """
        if self.length_quantile is not None:
            return self.length_quantile
        return {AdmissionMode.PREDICTIVE: 0.4, AdmissionMode.GUARANTEED: 0.5}.get(self.mode, 1.0)

    @property
    def cautious(self) -> bool:
        """Whether lengths are forecast at a higher quantile while few requests run; True by default."""
        return self.length_quantile is None and self.forecasts

    @property
    def reserve(self) -> float:
        """Share of the pool's usable KV blocks that must stay free when a new request starts."""
        if self.watermark is not None:
            return self.watermark
        return 0.004 if self.mode is AdmissionMode.PREDICTIVE else 0.0

    @property
    def lookahead(self) -> int:
        """Number of requests behind the first in the queue that may try to start before it.

        In benchmarks/admission.py, overtaking saves 1.3 % of the steps of guaranteed mode, and nearly all
        skipped steps. In predictive mode it cost 0.4 % more steps and 3 preemptions. vLLM's rule lets no
        request overtake.
        """
        return 8 if self.mode is AdmissionMode.GUARANTEED else 0

    @property
    def forecasts(self) -> bool:
        """Whether this admission mode forecasts the use of KV blocks over time.

        Only with a forecast may a later request be admitted before an earlier one.
        """
        return self.mode in (AdmissionMode.GUARANTEED, AdmissionMode.PREDICTIVE)

    def under(self, rule: Rule) -> Policy:
        """Return the greedy or predictive policy that mode ``auto`` applies while it follows ``rule``."""
        if rule == VLLM:
            return Policy(AdmissionMode.GREEDY, tenant_blocks=self.tenant_blocks, keys=self.keys)
        assert rule.share is not None
        return Policy(AdmissionMode.PREDICTIVE, 1 - rule.share, 0.0, self.tenant_blocks, keys=self.keys)

    def margin(self, limits: Limits) -> int:
        """Return the number of KV blocks that must stay free when a new request starts."""
        return int(self.reserve * limits.usable_blocks)


def blocks_taken(
    snapshot: RunningSnapshot,
    outlook: Callable[[], Outlook],
    limits: Limits,
    policy: Policy,
    new: Newcomer | None = None,
    head: Head | None = None,
) -> Iterator[int]:
    """Yield the numbers of KV blocks that must fit the pool, beside the policy's margin, for ``new`` to start.

    The first number is cheap to compute: the blocks that all requests hold or need for their prompts. Modes
    that forecast lengths also yield the forecast peak of blocks and, with ``head``, the peak after the start of
    ``head``. The function is for layouts with a full-attention group, in every mode except ``no_evict``. The
    time is O(running * 16), some tens of microseconds for 256 requests.

    Args:
        snapshot: The running requests.
        outlook: Function that forecasts their lengths, by `forecast.LengthForecast` at ``policy.quantile``.
        limits: Limits of the pool.
        policy: The admission policy.
        new: The request that would start, if any.
        head: The first waiting request, if ``new`` would start before it.
    """
    from tonnage.cache.admission.loops import missing_blocks

    block_size, groups = limits.layout.block_size, num_full(limits.layout)
    common = snapshot.windowed + snapshot.used
    missing = missing_blocks(snapshot.rows, block_size, groups)
    if new is not None:
        common += new.windowed + new.cached
        missing += new.prompt_missing(block_size, groups)
    # Prompts admitted earlier take their blocks first. Blocks that this step's prompt chunks take are already
    # counted as held.
    yield common + missing
    if not policy.forecasts:
        return
    forecast = outlook()
    growth, beyond = forecast.growth, forecast.beyond
    common -= forecast.private
    added: tuple[Added, ...] = ()
    if new is not None:
        length, chunk = forecast.own, limits.max_num_batched_tokens
        if forecast.prompts + new.entry[PROMPT_LEFT] <= chunk:
            length -= 1  # a prompt that fits in one step also produces the first token in that step
        added = (new.growth(length, forecast.prompts, block_size, chunk, groups),)
        common -= new.entry[PRIVATE]
        beyond = min(beyond, new.beyond(length, block_size, groups))
        if new.lost is not None and new.lost.any():
            growth = forecast.without(new.lost, groups)
            common += int(new.lost.sum())
    if policy.mode is AdmissionMode.GUARANTEED:
        # A request may need more blocks than its forecast (`Outlook.beyond`). With fewer free blocks than
        # the smallest such excess, only one request would grow at a time and all others would skip steps.
        common += max(0, beyond)
    yield common + groups * peak_of(growth, block_size, 0, added)
    if head is not None:
        added = (*added, added_head(head, block_size))
        yield common + groups * peak_of(growth, block_size, head.start, added)
