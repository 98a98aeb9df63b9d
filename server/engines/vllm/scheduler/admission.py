"""Admission for one step inside vLLM: which waiting requests start, and which running ones skip the step.

`tonnage.cache.admission.decide` makes the decisions. This module fills its `State` with block counts and
lengths from vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from tonnage.cache.admission import AdmissionMode, Policy, committed_peak
from tonnage.cache.admission import decide as decisions
from tonnage.cache.admission.adapter import AdmissionAdapter
from tonnage.cache.admission.decide import State
from tonnage.cache.admission.forecast import FloatArray, LengthForecast
from tonnage.cache.admission.loops import compile_loops
from tonnage.cache.admission.outlook import Newcomer
from tonnage.cache.blocks.state import Int64Array
from tonnage.planner.units import ceil_div
from tonnage.server.engines.vllm.scheduler.account import Account, Hit
from tonnage.server.engines.vllm.scheduler.key_shares import KeyShares

# Upper bound of the requests that start in one step, so that a burst of requests is spread over several steps.
_WAVE = 32


class SteadyForecast(LengthForecast):
    """A forecast of output lengths that recomputes its survival curve only every `every` steps.

    `every` is the block size, because the curve changes too little in so few steps to affect admission. The
    caller sets `step` to the current step.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.step, self._every, self._until = 0, every, 0
        self._curve: FloatArray | None = None

    def _survival(self, *args: Any) -> FloatArray:
        if self._curve is None or self.step >= self._until:
            self._curve, self._until = super()._survival(*args), self.step + self._every
        return self._curve


class VllmAdmission(AdmissionAdapter):
    """An admission policy applied to the requests that vLLM runs or queues.

    In greedy mode, it only finds requests that can never fit, and vLLM's own rule decides which requests start.
    """

    def __init__(self, policy: Policy, account: Account) -> None:
        self.account, self.groups = account, account.groups
        self.forecast = SteadyForecast(account.groups.limits.layout.block_size)
        super().__init__(policy, account.groups.limits, self.forecast)
        compile_loops()  # compile now, so that no request waits for it.
        # ``_refused`` has the id of the request refused last, and the step of its refusal. After a refusal,
        # each request that leaves permits one new decision. If `block_size` / 4 steps have passed and a request
        # has left, admission decides on all waiting requests again: the freed blocks may suffice for two.
        self._refused = ("", -self.limits.layout.block_size)
        self._head = ""  # id of the first waiting request that was not admitted
        self._short = 0  # number of blocks that the refused request lacked
        # value of `account.departed` at the last refusal, plus the number of requests admitted since
        self._departed = 0
        self._departed_then = 0  # value of `account.departed` at the last refusal
        # what each API key holds, during a step in which several keys share the engine; otherwise None
        self._keys: KeyShares | None = None
        self._fresh: list[Hit] = []  # prefix hits of the requests that start in this step.
        # In guaranteed mode, the number of blocks that steps may still take before a running request must skip
        # a step.
        self._slack = 0

    # -- requests that can never fit -------------------------------------------------------------------------

    def never(self, request: Any) -> str | None:
        """Return why an empty pool cannot hold the request, with the block counts, or None if it can.

        The modes guaranteed and no_evict count prompt and max_tokens. The other modes count only the tokens
        that exist now.
        """
        needed, what = self._needed(request)
        usable = self.limits.usable_blocks
        if needed <= usable:
            return None
        return (
            f"the request needs {needed} KV blocks for {what} ({request.num_prompt_tokens} prompt tokens, "
            f"max_tokens {request.max_tokens}), the pool has {usable}"
        )

    def _needed(self, request: Any) -> tuple[int, str]:
        """Return how many KV blocks a request needs in an empty pool, and text that says for which tokens."""
        if self.policy.mode in (AdmissionMode.GUARANTEED, AdmissionMode.NO_EVICT):
            return sum(self.account.reservation(request)), "prompt and max_tokens"
        # `most_blocks` leaves out the last token of the given number, because the last token that a request
        # generates needs no slot. All tokens that exist now need a slot, so the number is one higher.
        return sum(self.groups.most_blocks(request.num_tokens + 1, 0)), "its tokens alone"

    # -- figures for metrics ---------------------------------------------------------------------------------

    def missing(self, request: Any) -> int:
        """Return how many KV blocks an empty pool lacks for the request."""
        return max(0, self._needed(request)[0] - self.limits.usable_blocks)

    def short_of(self, id: str) -> int:
        """Return how many KV blocks a request lacked if it is the one that admission refused last, else 0."""
        return self._short if self._refused[0] == id else 0

    def _state(self, most: int = 0) -> State:
        """Return the `State` of the running requests, with empty rows for up to `most` new requests."""
        snapshot = self.account.snapshot()
        return State(
            snapshot, decisions.empty_rows(snapshot, most), self.account.reserved,
            snapshot.output.astype(np.int64), outsiders=self.account.outsiders(),
        )  # fmt: skip

    # -- one step --------------------------------------------------------------------------------------------

    def plan(
        self, waiting: Iterable[Any], room: int, step: int, keys: KeyShares | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Return the waiting requests that may start in this step, and the running requests that skip it.

        Args:
            waiting: the queue in order. As in vLLM, no request overtakes another, so admitted requests are a
                prefix of the queue.
            room: upper bound of the requests that may start.
            step: number of the step.
            keys: sequences and blocks that each API key holds; None if API keys do not share the engine.
        """
        self._keys = keys
        self.forecast.step = step
        self._fresh.clear()
        waiting = iter(waiting)
        head = next(waiting, None) if room > 0 else None
        most = 0 if head is None else max(0, min(room, _WAVE, self._asks(head, step)))
        if not most and not self._may_stall():
            return [], []
        state = self._state(most)
        allowed = self._may_start(chain((head,), waiting), most, room, step, state) if most else []
        if not self._may_stall(state):
            return allowed, []
        return self._granted(allowed, state)

    def _asks(self, head: Any, step: int) -> int:
        """Return an upper bound of the number of waiting requests on which admission decides in this step.

        For `block_size` steps after a refusal, the decision changes only if another request leaves. So each
        request that leaves permits one decision. This bound does not apply if the queue has a new head, because
        no decision on it exists: the previous head was aborted, or a request with a higher priority arrived.
        """
        if head.request_id != self._head:
            return _WAVE
        since, size = step - self._refused[1], self.limits.layout.block_size
        if since >= size or (since >= size // 4 and self.account.departed > self._departed_then):
            return _WAVE
        return self.account.departed - self._departed

    def took(self, blocks: int) -> None:
        """Record how many KV blocks, of all groups, a step took from vLLM's pool."""
        self._slack -= blocks

    def _may_start(self, waiting: Iterable[Any], most: int, room: int, step: int, state: State) -> list[Any]:
        """Return the requests at the head of the queue that admission accepts, and add them to `state`.

        At most `most` requests are returned. `room` is the number of requests that the batch has room for.
        """
        allowed: list[Any] = []
        budget = self.limits.max_num_batched_tokens
        for request in waiting:
            self._head = request.request_id
            if len(allowed) == most or budget <= 0:
                break
            hit = self.account.find(request)
            new = self._newcomer(request, hit)
            if self._keys is not None:
                seats, new.kept = self._keys.kept(request)
                if len(allowed) + seats >= room:
                    break
            short = decisions.decide(state, new, self.rules)
            if short > 0:
                self._refused, self._short = (request.request_id, step), short
                self._departed = self._departed_then = self.account.departed
                break
            state.take(new)
            if self._keys is not None:
                self._keys.take(request)
            self._fresh.append(hit)
            self._departed += 1
            allowed.append(request)
            budget -= request.num_tokens - hit.tokens
        return allowed

    def _newcomer(self, request: Any, hit: Hit) -> Newcomer:
        """Return what admission needs to decide on a waiting request: its block counts and its lengths."""
        groups = self.groups
        full, windowed = self.account.reservation(request)
        output = request.num_tokens - request.num_prompt_tokens
        entry = (
            len(hit.blocks) * groups.count, hit.cached * groups.count, full,
            request.num_prompt_tokens + groups.lookahead, request.num_tokens - hit.tokens,
            output, max(1, request.max_tokens - output), 1,
        )  # fmt: skip
        return Newcomer(
            entry, hit.cached * groups.count, windowed, full + windowed, self.account.lost(hit), output
        )

    # -- skipped steps ---------------------------------------------------------------------------------------

    def _may_stall(self, state: State | None = None) -> bool:
        """Return whether a running request could lack KV blocks in the next step.

        No request lacks blocks if all reservations fit into the pool, or if a step takes at most as many blocks
        as are free.
        """
        if not self.policy.forecasts or not self.groups.count:  # in auto mode, vLLM handles a lack of blocks
            return False
        reserved = self.account.reserved if state is None else state.reserved
        outsiders = self.account.outsiders()
        if reserved <= self.limits.usable_blocks and not outsiders:
            self._slack = 0  # `_slack` is not used while all reservations fit into the pool
            return False
        if outsiders or self.groups.others:
            return True
        if self.policy.mode is AdmissionMode.GUARANTEED:
            return (state is not None and bool(self._fresh)) or self._slack < self._most_taken(state)
        available = self.account.pool.get_num_free_blocks() if state is None else state.snapshot.available
        return bool(available < self._most_taken(state))

    def _most_taken(self, state: State | None) -> int:
        """Return an upper bound of the full-attention KV blocks that one step takes from the pool."""
        scheduler, size = self.account.scheduler, self.limits.layout.block_size
        if state is None:
            count, prompts = len(scheduler.running), self.limits.max_num_batched_tokens
            if not scheduler._inflight_prefills:
                prompts = 0
        else:
            count, prompts = len(state.snapshot), int(state.snapshot.prompt_left.sum())
        prompts = min(prompts, self.limits.max_num_batched_tokens)
        each = 1 + ceil_div(self.groups.lookahead, size)
        return (count * each + ceil_div(prompts, size)) * self.groups.count

    def _granted(self, allowed: list[Any], state: State) -> tuple[list[Any], list[Any]]:
        """Return the requests of `allowed` that may start, and the running requests that skip the step.

        A request may start if the admission rule grants it the blocks for its first chunk. If skipping requests
        cannot prevent a preemption, or would leave no request to run, none is skipped and vLLM's own rule
        applies. The last rows of `state` are the requests in `allowed`.
        """
        running, snapshot = self.account.scheduler.running, state.snapshot
        if self.policy.mode is AdmissionMode.GUARANTEED:
            self._slack = snapshot.capacity - committed_peak(snapshot)
            if self._most_taken(state) <= self._slack and not self.account.outsiders():
                return allowed, []
            wanted = self._wanted(state)
            if int(wanted.sum()) <= self._slack:
                return allowed, []
        else:
            wanted = self._wanted(state)
        granted = decisions.grant(
            snapshot,
            np.arange(len(wanted)),
            wanted,
            self.rules,
            lambda: self.account.leaving(snapshot, self._fresh),
        )
        if granted is None:
            return allowed, []
        if self.policy.mode is not AdmissionMode.GUARANTEED:
            # Grant all blocks to requests that start, because vLLM starts none without free blocks.
            granted[len(running) :] = wanted[len(running) :]
        short = np.flatnonzero(granted < wanted).tolist()
        stalled = [running[at] for at in short if at < len(running)]
        started = next((at - len(running) for at in short if at >= len(running)), len(allowed))
        if len(stalled) == len(running) and not started:
            return allowed, []
        return allowed[:started], stalled

    def _wanted(self, state: State) -> Int64Array:
        """Return an upper bound of the KV blocks that each request takes in the next step, int64 [requests].

        Only blocks of full-attention groups count.
        """
        snapshot, size, count = state.snapshot, self.limits.layout.block_size, self.groups.count
        left = snapshot.prompt_left
        chunk = np.minimum(left, self.limits.max_num_batched_tokens)
        # ``at`` is the position of the first token that the step computes for each request. A request's slots
        # end at position ``prompt + output``, because ``prompt`` includes the lookahead slots. A decode
        # computes the last token before this end. A prefill has the last ``left`` tokens before it to compute.
        at = snapshot.prompt + snapshot.output - np.where(left > 0, left, 1)
        reach = -(-(at + np.where(left > 0, chunk, 1)) // size) * count
        wanted: Int64Array = (np.minimum(reach, snapshot.reserved) - snapshot.held).astype(np.int64)
        return np.maximum(wanted, 0)
