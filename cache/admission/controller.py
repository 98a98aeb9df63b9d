"""Admission: a policy and what it has learned; the one object that a block manager asks.

It decides from what it is given and changes nothing but its histogram of output lengths (`Admission.ended`), so
the server, the replay of a trace and a test run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.admission.passing import Head, head_start
from tonnage.cache.admission.policy import AdmissionMode, Newcomer, Policy, decide_running, victim
from tonnage.cache.admission.safety import Int64Array, Leaving, grant, is_safe
from tonnage.cache.admission.snapshot import Int32Array, RunningSnapshot
from tonnage.cache.admission.types import AdmissionRequest, Decision, Limits
from tonnage.cache.blocks.groups import num_full

IntArray = npt.NDArray[np.integer]


class Admission:
    """``policy`` over ``limits``. ``ended`` teaches it; everything else only reads."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self.policy = policy
        self.limits = limits
        self.forecast = LengthForecast(policy.quantile)
        self._groups = num_full(limits.layout)

    def decide(
        self,
        request: AdmissionRequest,
        snapshot: RunningSnapshot,
        running: Sequence[AdmissionRequest],
        *,
        hit_used: int = 0,
        hit_cached: int = 0,
        private_lost: Int32Array | None = None,
        tenant_reserved: int = 0,
        head: Head | None = None,
    ) -> Decision:
        """Whether ``request`` may start now. ``running``: the requests of the snapshot's entries, in order; the
        rest as in `policy.Newcomer`. ``head``: the request it would overtake, from `start_of`."""
        left = self._left(request, snapshot, running)
        new = Newcomer(request, int(left[-1]), hit_used, hit_cached, private_lost, tenant_reserved)
        return decide_running(new, snapshot, left[:-1], self.limits, self.policy, head)

    def start_of(
        self, request: AdmissionRequest, snapshot: RunningSnapshot, running: Sequence[AdmissionRequest]
    ) -> Head:
        """When ``request``, first in the queue and without room, begins if all goes as forecast."""
        left = self._left(request, snapshot, running)
        return head_start(request, int(left[-1]), snapshot, left[:-1], self.limits, self.policy.reserve)

    def grant(
        self,
        snapshot: RunningSnapshot,
        entries: IntArray,
        wanted: IntArray,
        exact: Callable[[], Leaving],
    ) -> Int64Array:
        """Blocks each sequence of a step may take; int64 [sequences]. Arguments as of `safety.grant`.

        ``exact`` is called where the bound on shared blocks does not suffice. Modes that preempt serve first
        come first served while blocks are available.
        """
        if self._groups == 0:  # windows: all they can hold is set aside
            return np.asarray(wanted, dtype=np.int64)
        if not self.policy.safe:
            return _in_order(np.asarray(wanted, dtype=np.int64), snapshot.available, self._groups)
        granted = grant(snapshot, entries, wanted, multiple=self._groups)
        if int(granted.sum()) < int(np.sum(wanted)) and not is_safe(snapshot):
            granted = grant(snapshot, entries, wanted, multiple=self._groups, leaving=exact())
        return granted

    def victim(self, snapshot: RunningSnapshot, candidates: IntArray | None = None) -> int:
        """Entry of the running request to preempt; in guaranteed mode nobody ever has to be."""
        among = np.arange(len(snapshot)) if candidates is None else candidates
        return victim(snapshot, among, self.policy.mode)

    def ended(self, output_tokens: int, tenant: str = "") -> None:
        """A sequence has ended by itself (not cancelled) after ``output_tokens`` tokens."""
        self.forecast.ended(output_tokens, tenant)

    def _left(
        self, request: AdmissionRequest, snapshot: RunningSnapshot, running: Sequence[AdmissionRequest]
    ) -> Int64Array:
        """int64 [running + 1]: output forecast for each of ``running`` and, last, for ``request``."""
        most = np.append(snapshot.output_left, request.max_tokens)
        if self.policy.quantile == 1 or self.policy.mode in (AdmissionMode.GREEDY, AdmissionMode.NO_EVICT):
            return most.astype(np.int64)
        produced = np.array([r.produced for r in running] + [request.produced], dtype=np.int64)
        produced[:-1] += snapshot.output
        return self.forecast.left(produced, most, [r.tenant for r in running] + [request.tenant])


def _in_order(wanted: Int64Array, available: int, multiple: int) -> Int64Array:
    before = np.cumsum(wanted) - wanted
    granted = np.clip(available - before, 0, wanted)
    partial = granted < wanted
    granted[partial] -= granted[partial] % multiple
    return granted
