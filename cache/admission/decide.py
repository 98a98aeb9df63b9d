"""The decisions of admission as pure functions of a `State`, which describes the running requests.

`decide` says whether a request may start, `committed` which blocks count as taken, and `grant` how many blocks
running sequences may take. `tonnage.cache.admission.controller` fills the state from our block manager,
`tonnage.server.engines.vllm.scheduler.admission` from vLLM's scheduler. This module imports neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.admission.outlook import Newcomer, Outlook, outlook_of
from tonnage.cache.admission.policy import Policy, blocks_taken
from tonnage.cache.admission.safety import IntArray, Leaving, committed_peak, is_safe
from tonnage.cache.admission.safety import grant as safe_grant
from tonnage.cache.admission.snapshot import COLUMNS, OUTPUT_LEFT, PRIVATE, RunningSnapshot
from tonnage.cache.admission.types import AdmissionMode, Head, Limits
from tonnage.cache.blocks.groups import num_full
from tonnage.cache.blocks.state import Int32Array, Int64Array


@dataclass(slots=True)
class State:
    """The running requests in order of admission, followed by the requests admitted in this step.

    Attributes:
        snapshot: Blocks that each request holds and may still need.
        rows: int32 [capacity, COLUMNS]: begins with the rows of ``snapshot``; a new request uses the next row.
        reserved: Blocks of all groups that are reserved for the requests.
        produced: int64 [running]: output tokens of each request so far, including output before a preemption.
        tenants: Tenant of each request [running] if lengths are forecast by tenant, else None.
        outsiders: Whether requests outside the snapshot may hold blocks.
        outlooks: Cached forecasts, keyed by the values of a waiting request that enter a forecast. Most waiting
            requests have the same values.
    """

    snapshot: RunningSnapshot
    rows: Int32Array
    reserved: int
    produced: Int64Array
    tenants: list[str] | None = None
    outsiders: bool = False
    outlooks: dict[tuple[object, ...], Outlook] = field(default_factory=dict)

    def with_one(self, new: Newcomer) -> RunningSnapshot:
        """Return a snapshot of the running requests with the waiting request ``new`` added.

        The result shares its arrays with the state, so the next call overwrites it.
        """
        now, count = self.snapshot, len(self.snapshot) + 1
        self.rows[count - 1] = new.entry
        rows = self.rows[:count]
        if new.lost is not None:
            rows = rows.copy()
            rows[: len(new.lost), PRIVATE] -= new.lost
        return RunningSnapshot(now.usable, now.used + new.cached, now.windowed + new.windowed, rows)

    def take(self, new: Newcomer) -> None:
        """Add the admitted request ``new`` to the running requests of this state."""
        after = self.with_one(new)
        self.rows[: len(after)] = after.rows
        self.snapshot = replace(after, rows=self.rows[: len(after)])
        self.reserved += new.reserved
        self.produced = np.append(self.produced, new.produced)
        if self.tenants is not None:
            self.tenants = [*self.tenants, new.tenant]
        self.outlooks.clear()


def empty_rows(snapshot: RunningSnapshot, most: int) -> Int32Array:
    """Return an array with the rows of ``snapshot`` and space for ``most`` further requests.

    The array is int32 [running + most, COLUMNS]; the rows of further requests are uninitialized.
    """
    rows = np.empty((len(snapshot) + most, COLUMNS), np.int32)
    rows[: len(snapshot)] = snapshot.rows
    return rows


@dataclass(slots=True)
class Rules:
    """The inputs of admission decisions: the policy in effect, the pool's limits, and learned output lengths.

    The policy sets the quantile at which ``forecast`` estimates lengths.
    """

    policy: Policy
    limits: Limits
    forecast: LengthForecast
    margin: int = field(init=False)
    by_sum: bool = field(init=False)

    def __post_init__(self) -> None:
        self.forecast.quantile, self.forecast.cautious = self.policy.quantile, self.policy.cautious
        self.margin = self.policy.margin(self.limits)
        # Without a full-attention group, the number of blocks of a sequence stops growing (sliding windows,
        # recurrent states). The sum of the reservations is then the peak.
        self.by_sum = self.policy.mode is AdmissionMode.NO_EVICT or num_full(self.limits.layout) == 0

    def follow(self, policy: Policy) -> None:
        """Use the admission policy ``policy`` for all later decisions."""
        if policy != self.policy:
            self.policy = policy
            self.__post_init__()

    def outlook(self, state: State, new: Newcomer | None = None) -> Outlook:
        """Forecast the lengths and blocks of the running requests, for a decision on the request ``new``.

        Of ``new`` only the tenant and the output tokens enter the forecast. It is cached in ``state`` for other
        requests with the same values.
        """
        output_left = 0 if new is None else new.entry[OUTPUT_LEFT]
        own = (0, "") if new is None else (new.produced, new.tenant)
        key = (self.policy.quantile, self.forecast.count, output_left, *own)
        found = state.outlooks.get(key)
        if found is None:
            left, count = self._lengths(state, new), len(state.snapshot)
            length = 0 if new is None else int(left[count])
            found = outlook_of(state.snapshot, left[:count], self.limits, length)
            state.outlooks[key] = found
        return found

    def _lengths(self, state: State, new: Newcomer | None) -> Int64Array:
        """Return the forecast remaining output tokens of the running requests and the waiting one, ``new``.

        The result is int64 [running], or [running + 1] if ``new`` is given.
        """
        most, produced, tenants = state.snapshot.output_left.astype(np.int64), state.produced, state.tenants
        if new is not None:
            most = np.append(most, new.entry[OUTPUT_LEFT])
            produced = np.append(produced, new.produced)
            if tenants is not None or new.tenant:
                tenants = [*(tenants or [""] * len(state.snapshot)), new.tenant]
        if self.policy.quantile == 1 or not self.policy.forecasts:
            return most
        return self.forecast.left(produced, most, tenants)


def decide_by_sum(
    reserved: int, wanted: int, alone: bool, rules: Rules, *, head: bool = False, outsiders: bool = False
) -> int | None:
    """Return how many KV blocks a new request lacks (0 or less: none), if the sum of all reservations shows it.

    Returns None if the forecast of blocks over time is needed; then `decide` evaluates it.

    Args:
        reserved: Blocks reserved for the running requests.
        wanted: Blocks to reserve for the new request.
        alone: Whether no other request runs. The new request then fits, because requests that can never fit are
            rejected before.
        rules: The policy and limits in effect.
        head: Whether the new request would start before the first request of the queue.
        outsiders: Whether requests that do not run may hold blocks.
    """
    short = reserved + wanted + rules.margin - rules.limits.usable_blocks
    # If all reservations fit together, no allocation can fail.
    if alone or (short <= 0 and not head and not outsiders):
        return 0
    if rules.by_sum or (head and not rules.policy.forecasts):
        return max(int(head), short)
    return None


def decide(state: State, new: Newcomer, rules: Rules, head: Head | None = None) -> int:
    """Return how many KV blocks must be released before ``new`` may start; 0 or less: it may start now.

    Args:
        state: The running requests. The call changes nothing but the unused array row after the last request.
        new: The request to decide on.
        rules: The policy and limits in effect.
        head: The first request of the queue, if ``new`` would start before it. The start of ``head`` must not
            be delayed.
    """
    short = decide_by_sum(
        state.reserved, new.reserved + new.kept, not len(state.snapshot), rules,
        head=head is not None, outsiders=state.outsiders,
    )  # fmt: skip
    if short is not None:
        return short
    limits, policy = rules.limits, rules.policy
    room = limits.usable_blocks - rules.margin - new.kept
    for taken in blocks_taken(state.snapshot, lambda: rules.outlook(state, new), limits, policy, new, head):
        if taken > room:
            return taken - room
    if policy.mode is AdmissionMode.GUARANTEED:  # Every request must still be able to finish.
        after = state.with_one(new)
        return max(0, committed_peak(after) + new.kept - after.capacity)
    return 0


def committed(state: State, rules: Rules) -> int:
    """Return the number of KV blocks that are not available to a new request.

    Running requests hold these blocks or are forecast to take them, or the policy keeps them free (margin).
    """
    if not len(state.snapshot):
        return 0
    taken = state.reserved
    if not rules.by_sum:
        parts = blocks_taken(state.snapshot, lambda: rules.outlook(state), rules.limits, rules.policy)
        taken = min(taken, max(parts))
    return min(rules.limits.usable_blocks, taken + rules.margin)


def grant(
    snapshot: RunningSnapshot,
    entries: IntArray,
    wanted: Int64Array,
    rules: Rules,
    leaving: Callable[[], Leaving],
) -> Int64Array | None:
    """Return how many KV blocks each sequence may take now, int64 [sequences]; earlier sequences come first.

    In guaranteed mode every request can still finish after all grants (`tonnage.cache.admission.safety`). The
    other modes grant blocks as long as some are available. Returns None if some request cannot finish even
    without any grant.

    Args:
        snapshot: The running requests, including the requests admitted in this step.
        entries: int [sequences]: index in the snapshot of each sequence's request.
        wanted: int64 [sequences]: requested blocks, over all full-attention groups.
        rules: The policy and limits in effect.
        leaving: Function that counts exactly which blocks each request returns when it ends. It reads all block
            tables, so it is called only if the lower bound of these blocks does not suffice.
    """
    if rules.policy.mode is not AdmissionMode.GUARANTEED:
        return np.clip(snapshot.available - (np.cumsum(wanted) - wanted), 0, wanted)
    groups = num_full(rules.limits.layout)
    granted = safe_grant(snapshot, entries, wanted, multiple=groups)
    if (granted < wanted).any() and not is_safe(snapshot):
        exact = leaving()
        if not is_safe(snapshot, exact):
            return None
        granted = safe_grant(snapshot, entries, wanted, multiple=groups, leaving=exact)
    return granted
