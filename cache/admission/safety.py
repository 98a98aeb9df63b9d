"""Safety in guaranteed mode: every admitted request can always still run to its max_tokens.

This is the banker's algorithm (E. W. Dijkstra, EWD 623) for one resource, blocks. A request's *need* is its
reservation minus the blocks it holds. A state is **safe** if its requests have an order in which each, when its
turn comes, finds its whole need available::

    capacity - |blocks held by it and by the requests after it| >= need        for each, in that order

**Two rules keep every state safe.** A request is admitted only if the state with it is safe. A block is granted
to a running sequence only if the state after it is safe. Otherwise the sequence *stalls* for this step: it
keeps its blocks and computes nothing. No request is ever preempted to free blocks.

**No other event makes a safe state unsafe.** Take an order that shows safety, and the inequality of each
request. The *union* of a request is the set of blocks held by it and by the requests after it; a shared block
counts once.

- A request ends, is cancelled, or one of its n sequences ends: blocks leave the union and need does not grow.
  The reservation shrinks by at least what the sequence alone held.
- A computed block duplicates a published one and is given back: the union of any set of requests shrinks or
  stays, and no request's ``held`` changes.
- A block stops being shared because its other owner left: the union stays or shrinks.
- A sliding window releases a block: the upper bound of its blocks is subtracted from the pool in full
  (`RunningSnapshot.windowed`), so no inequality changes.
- An unreferenced cached block is available. A prefix hit on it is an allocation and is checked as one. Evicting
  it changes nothing.

**There is always progress.** In a safe state the first request of the order finds its whole need available.
Granting it a part of its need keeps the order valid, since the available blocks and its need fall by the same
number. This request can therefore continue, needs no block, or waits for its share of the token budget. A
scheduler that offers the budget of a stalled sequence to the next sequence always computes something. Each step
computes at least one token of a finite number, so every request ends.

The argument uses no clock, no chunk size and no order of prefill and decode. A rule that forecasts a peak from
lockstep decoding depends on all three. With 805 blocks, such a rule admits two requests: one with a prompt of
1,600 tokens and max_tokens 3,200, one with 8,000 and 1,600. Together they need 808 blocks with prefill chunks
of 64 tokens, and 834 with chunks of 16.

**Sharing.** Counting the union for each request of the order takes a walk over all block tables. In nearly
every step a lower bound of the blocks that each request returns is enough: the blocks that this request alone
references (``private``). A grant under the bound is safe. The exact count (`last_owners`) is used only if the
bound cannot show that the present state is safe, and would stall more sequences than necessary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.snapshot import RunningSnapshot

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]


def finishing_order(need: IntArray, returns: IntArray) -> Int64Array:
    """Return the order in which requests can finish, int64 [running]: smallest need first, then largest return.

    If any order lets every request finish, this one does. Available blocks only grow along an order, so a
    request with a larger need never has to come first.
    """
    return np.argsort(finishing_keys(need, returns), kind="stable")


def finishing_keys(need: IntArray, returns: IntArray) -> Int64Array:
    """Return one sort key per request, int64 [running]: ascending keys give the order of `finishing_order`.

    Args:
        need: int [running]: blocks that each request may still take.
        returns: int [running]: blocks that each request frees when it ends.
    """
    # ``need`` and ``returns`` are below 2^31, so one int64 key holds both. Sorting it takes a third of the time
    # of lexsort.
    keys = need.astype(np.int64) << 32
    keys -= returns
    return keys


def slack_of(order: Int64Array, available: int, need: IntArray, returns: IntArray) -> Int64Array:
    """Return, for each running request, the KV blocks available at its turn to finish minus its need.

    The result is int64 [running], in the order ``order``.

    ``order`` has the snapshot indices in finishing order, ``need`` the blocks that each request may still take.
    ``returns`` [running] has the blocks that become available when a request ends, without blocks it still has
    to take.
    """
    back = returns[order].astype(np.int64)
    slack: Int64Array = available + np.cumsum(back) - back - need[order]
    return slack


@dataclass(frozen=True, slots=True)
class Leaving:
    """An order in which the running requests can finish, with the exact number of KV blocks that each frees.

    Attributes:
        order: int64 [running]: snapshot indices of the requests in finishing order.
        returns: int64 [running]: number of blocks that each request returns when it ends.
        used: Number of distinct blocks of all requests, if counted; None: the snapshot's number is used.
    """

    order: Int64Array
    returns: Int64Array
    used: int | None = None

    def available(self, snapshot: RunningSnapshot) -> int:
        """Return the number of blocks that full-attention groups can still allocate."""
        return snapshot.available if self.used is None else snapshot.capacity - self.used


def is_safe(snapshot: RunningSnapshot, leaving: Leaving | None = None) -> bool:
    """Return whether every request can still run to the end of its reservation, one after the other."""
    return committed_peak(snapshot, leaving) <= snapshot.capacity


def committed_peak(snapshot: RunningSnapshot, leaving: Leaving | None = None) -> int:
    """Return the peak number of full-attention KV blocks if all requests run to max_tokens one after another.

    The requests finish in `finishing_order`. Guaranteed mode keeps this peak within `RunningSnapshot.capacity`.
    Without ``leaving``, lower bounds of the returned blocks are used. The result is then an upper bound, which
    is exact if no block is shared.
    """
    if len(snapshot) == 0:
        return snapshot.used
    if leaving is None:
        from tonnage.cache.admission.loops import least_slack

        keys = finishing_keys(snapshot.need, snapshot.private)
        keys.sort()
        return snapshot.capacity - least_slack(keys, snapshot.available)
    slack = slack_of(leaving.order, leaving.available(snapshot), snapshot.need, leaving.returns)
    return snapshot.capacity - int(slack.min())


def grant(
    snapshot: RunningSnapshot,
    entries: IntArray,
    blocks: IntArray,
    *,
    multiple: int = 1,
    leaving: Leaving | None = None,
) -> Int64Array:
    """Return how many KV blocks each sequence may take in this step, int64 [sequences].

    Sequences are served in the given order. If every request can finish before the grants, every request can
    finish after them. A partial grant is a multiple of ``multiple``. A prefill chunk is cut to the grant; a
    decode that is granted 0 blocks skips the step.

    Args:
        snapshot: The running requests.
        entries: int [sequences]: snapshot index of each sequence's request.
        blocks: int [sequences]: blocks that each sequence needs, within its request's reservation.
        multiple: The number of full-attention groups, since each block of tokens takes one block in each group.
        leaving: Exact finishing order and returned blocks; None: lower bounds of the returned blocks are used.
    """
    wanted = np.asarray(blocks, dtype=np.int64)
    total = int(wanted.sum())
    if total == 0:
        return wanted
    need = snapshot.need.astype(np.int64)
    back = snapshot.private.astype(np.int64) if leaving is None else leaving.returns.copy()
    order = finishing_order(need, back) if leaving is None else leaving.order
    available = snapshot.available if leaving is None else leaving.available(snapshot)
    slack = slack_of(order, available, need, back)
    # The slack of a request is the number of available blocks at its turn to finish, minus its need. Blocks
    # granted to a request reduce the slack of the requests that finish before it, and of no other request.
    if total <= int(slack.min()):
        return wanted
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    granted = np.zeros_like(wanted)
    for at, (entry, want) in enumerate(zip(np.asarray(entries).tolist(), wanted.tolist(), strict=True)):
        before = int(place[entry])
        most = max(0, min(want, int(slack[:before].min()))) if before else min(want, available)
        # an order in which the granted request finishes earlier may allow a larger grant
        if most < want and leaving is None:
            most = _most_by_new_order(available, need, back, entry, want, most)
        most -= most % multiple if most < want else 0
        if most == 0:
            continue
        granted[at] = most
        available -= most
        need[entry] -= most
        back[entry] += most
        if leaving is None:
            order = finishing_order(need, back)
            place[order] = np.arange(len(order))
        slack = slack_of(order, available, need, back)
    return granted


def _most_by_new_order(
    available: int, need: Int64Array, back: Int64Array, entry: int, want: int, known: int
) -> int:
    """Return the most KV blocks in [known, want] that a request can be granted so that all requests can finish.

    A grant of ``known`` blocks is known to be safe. Bisection is valid, because a larger grant is never safer:
    it leaves fewer blocks to the requests that finish before the granted one, and does not reduce the total
    that the granted request needs.
    """
    low, high = known, min(want, available)
    while low < high:
        middle = (low + high + 1) // 2
        after_need, after_back = need.copy(), back.copy()
        after_need[entry] -= middle
        after_back[entry] += middle
        order = finishing_order(after_need, after_back)
        fits = int(slack_of(order, available - middle, after_need, after_back).min()) >= 0
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def last_owners(snapshot: RunningSnapshot, tables: IntArray, owners: IntArray, num_blocks: int) -> Leaving:
    """Return how many KV blocks each request frees when it ends; a shared block counts for its last owner.

    The requests end in `finishing_order`. The time is proportional to the number of table entries.

    Args:
        snapshot: The running requests.
        tables: int [entries]: block ids in the tables of all running sequences' full-attention groups,
            flattened, without null blocks.
        owners: int [entries]: snapshot index of each block's request.
        num_blocks: Blocks of the pool.
    """
    order = finishing_order(snapshot.need, snapshot.private)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    last = np.full(num_blocks, -1, dtype=np.int64)
    np.maximum.at(last, tables, place[owners])
    returns = np.empty_like(order)
    held = last[last >= 0]
    returns[order] = np.bincount(held, minlength=len(order))
    return Leaving(order, returns, len(held))
