"""The law of guaranteed mode: only states in which every admitted request can still run to its max_tokens.

This is the banker's algorithm (E. W. Dijkstra, EWD 623) for one resource, blocks. A request's *need* is what it
was reserved and does not hold. A state is **safe** when its requests can be put in an order such that each,
when its turn comes, finds its whole need available::

    capacity - |blocks held by it and by those after it| >= need        for each, in that order

**Two rules keep every state safe.** A request is admitted only if the state with it is safe. A block is
granted to a running sequence only if the state after it is safe; otherwise the sequence *stalls* for this step:
it keeps its blocks, computes nothing and loses nothing. Nobody is ever preempted to make room.

**Why nothing else can make a safe state unsafe.** With an order that shows safety, look at the inequality of
each request:

- somebody ends, is cancelled, or one of its n sequences ends: blocks leave the union, need does not grow (the
  reservation shrinks by at least what the sequence alone held);
- a computed block is found to be the duplicate of a published one and is given back: the union of any set of
  requests shrinks or stays, and nobody's ``held`` changes;
- a block stops being shared because its other owner left: the union stays or shrinks;
- sliding windows: what they can hold at most is set aside whole (`RunningSnapshot.windowed`), so dropping a
  block, shared or not, changes nothing here;
- a cached block that nobody references is available: turning it into a used one by a prefix hit is an
  allocation and is checked as one; evicting it changes nothing.

**Why there is always progress.** In a safe state the first of the order finds its whole need available, and
granting it a part leaves the same order valid (available and its need fall alike). So of those that want blocks
at least that one can go on, or it wants none and goes on anyway, or it waits for its share of the token budget;
a scheduler that offers the budget of a stalled sequence to the next one therefore never stands still. Each
step computes at least one token of a finite number, so every request ends. The argument knows no clock, no
chunk size and no order of prefill and decode, which is what a rule that forecasts a peak from lockstep decoding
lacks: with 805 blocks that rule admits (prompt 1,600, max_tokens 3,200) and (8,000, 1,600), which need 808 in
chunks of 64 tokens and 834 in chunks of 16.

**Sharing.** Counting a union for each place of the order takes a walk over the tables. A lower bound of what
leaves with each request is enough in nearly every step: the blocks that it alone references (``private``). What
the bound grants is safe; the exact count (`last_owners`) is asked for only where the bound cannot show what is
known to be so, that the present state is safe, and would stall more than has to be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tonnage.cache.admission.snapshot import RunningSnapshot

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]


def finishing_order(need: IntArray, returns: IntArray) -> Int64Array:
    """int64 [running]: smallest need first, among equals the one that returns most.

    If any order shows the state safe, this one does: available blocks only grow along an order, so a request
    that is not the next cannot be helped by taking a needier one before it.
    """
    return np.argsort(finishing_keys(need, returns), kind="stable")


def finishing_keys(need: IntArray, returns: IntArray) -> Int64Array:
    """int64 [running], in finishing order when sorted."""
    # One sort of a combined key costs a third of lexsort; both counts are below 2^31.
    keys = need.astype(np.int64) << 32
    keys -= returns
    return keys


def slack_of(order: Int64Array, available: int, need: IntArray, returns: IntArray) -> Int64Array:
    """int64 [running], in the order given: blocks available when its turn comes, less its need.

    ``returns`` [running]: blocks that become available when the request ends, those it is still to take apart.
    """
    back = returns[order].astype(np.int64)
    slack: Int64Array = available + np.cumsum(back) - back - need[order]
    return slack


@dataclass(frozen=True, slots=True)
class Leaving:
    """An order to finish in, int64 [running], and what becomes available as each one leaves, int64 [running] by
    entry: exact, but for this order only (`last_owners`). ``used``: the distinct blocks of all, where they are
    counted with it; None: as many as the snapshot says."""

    order: Int64Array
    returns: Int64Array
    used: int | None = None

    def available(self, snapshot: RunningSnapshot) -> int:
        """Return the blocks that full groups may still take."""
        return snapshot.available if self.used is None else snapshot.capacity - self.used


def is_safe(snapshot: RunningSnapshot, leaving: Leaving | None = None) -> bool:
    """Whether everybody can still run to the end of its reservation, one after the other."""
    return committed_peak(snapshot, leaving) <= snapshot.capacity


def committed_peak(snapshot: RunningSnapshot, leaving: Leaving | None = None) -> int:
    """Most blocks of full groups in use when all run to max_tokens one after the other, in finishing order.

    The law of guaranteed mode is that this never exceeds `RunningSnapshot.capacity`. Without ``leaving`` an
    upper bound, exact where nothing is shared.
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
    """How many blocks each sequence of this step may take now; int64 [sequences].

    ``entries`` [sequences]: the sequence's request, an index into the snapshot; ``blocks`` [sequences]: what it
    wants, within its reservation. The first served first. Less than wanted is a multiple of ``multiple`` (the
    full groups, as each block of tokens takes one in each): a prefill chunk can be cut to it, a decode that
    gets 0 stalls. The state after all grants is safe if the one before was.
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
    # A grant takes from the slack of those before its taker in the order, and from nobody else's.
    if total <= int(slack.min()):
        return wanted
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    granted = np.zeros_like(wanted)
    for at, (entry, want) in enumerate(zip(np.asarray(entries).tolist(), wanted.tolist(), strict=True)):
        before = int(place[entry])
        most = max(0, min(want, int(slack[:before].min()))) if before else min(want, available)
        if most < want and leaving is None:  # an order in which the taker comes earlier may allow more
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
    """Largest count in [known, want] after which the state is safe; ``known`` is.

    More is never safer: the others that can finish before the taker become fewer, and what it needs when its
    turn comes stays the same.
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
    """The exact count: a block becomes available when the last of its owners in the order leaves. O(entries).

    ``tables`` [entries]: block ids of all running sequences' full groups, flattened, no null blocks; ``owners``
    [entries]: the request of each, an index into the snapshot.
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
