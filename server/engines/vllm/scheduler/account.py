"""Reservations and blocks of the running requests, kept beside vLLM's own books.

An entry is made when a request starts. It has the reservation, the prompt length and the prefix hit. Read from
vLLM each time are the computed tokens of each request, the length of its block table, and the pool's free
blocks. The blocks of a table are read only when a new request finds a prefix. A step costs a few array
operations.

A block that two requests reference does not return to the pool when one of them ends. When a new request finds
a block in use, the block counts as shared as long as any request holds it. So the `private` blocks of a request
are exact or too low, and too low is safe (`tonnage.cache.admission.snapshot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

import numpy as np

from tonnage.cache.admission import Leaving, last_owners
from tonnage.cache.admission.loops import summarize
from tonnage.cache.admission.snapshot import COLUMNS, HELD, RunningSnapshot
from tonnage.cache.blocks.state import Int32Array
from tonnage.server.engines.vllm.scheduler.groups import Groups

# Columns of an entry. `tonnage.cache.admission.loops.summarize` reads the first five, in blocks of full groups.
# WINDOWED has the blocks of all other groups, which are reserved at once.
PROMPT, MAX_TOKENS, RESERVED, SHARED, PREFILL_END, WINDOWED = range(6)
_COMPUTED = attrgetter("num_computed_tokens")


@dataclass(frozen=True, slots=True)
class Hit:
    """The prefix that a waiting request would find in the cache.

    Attributes:
        blocks: vLLM's blocks of the first full group.
        tokens: tokens that need not be computed.
        used: blocks of one full group that running requests hold.
        cached: blocks of one full group that no request references.
    """

    blocks: Sequence[Any] = ()
    tokens: int = 0
    used: int = 0
    cached: int = 0


class Account:
    """Entries of the requests in `scheduler.running`.

    Call `leave` when a request ends or is preempted, and `sync` before and after a step.
    """

    def __init__(self, scheduler: Any, groups: Groups) -> None:
        self.scheduler, self.groups = scheduler, groups
        self.pool = scheduler.kv_cache_manager.block_pool
        self.reserved = 0  # blocks of all groups, all entries
        # Events that freed blocks: entries that left, and steps before which blocks returned without one.
        self.departed = 0
        self._free = self.pool.get_num_free_blocks()  # at the last `sync`
        self._departed_then = 0  # at the last `sync`
        # Prompt tokens that each unfinished request found in the prefix cache when it first started.
        self.found: dict[str, int] = {}
        self.recomputed = 0  # tokens that preempted requests had to compute again so far
        self._slots: dict[str, int] = {}
        self._hits: dict[str, int] = {}  # tokens found in the prefix cache, kept for groups that are not full
        self._unused = list(range(groups.limits.max_num_seqs - 1, -1, -1))
        self._kept = np.zeros((groups.limits.max_num_seqs, 6), np.int32)
        # Rows of the entries in the order of ``scheduler.running``: a prefix of a preallocated array.
        self._entries = np.zeros(groups.limits.max_num_seqs, np.int32)
        self._order = self._entries[:0]
        # Blocks of the first full group. ``_owner``: the request whose prompt filled the block, which may have
        # ended. ``_shared``: the content hash of each shared block; with other content it is no longer shared.
        self._owner: dict[int, str] = {}
        self._shared: dict[int, Any] = {}
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._tables: Any = {} if groups.full is None else managers[groups.full].req_to_blocks

    def __len__(self) -> int:
        return len(self._slots)

    def sync(self, scheduled: dict[str, int] | None = None) -> None:
        """Remove the entries of requests that no longer run, and add entries for requests that started.

        Args:
            scheduled: tokens of each request in the step just scheduled. None before a step, when no entry is
                added.
        """
        running = self.scheduler.running
        if len(self._slots) > len(running):
            here = {request.request_id for request in running}
            for id in [id for id in self._slots if id not in here]:
                self.leave(id)
        if scheduled is not None and len(self._slots) < len(running):
            known = self._slots
            fresh = list(takewhile(lambda request: request.request_id not in known, reversed(running)))
            for request in reversed(fresh):  # in order, since a request may share blocks of the one before it
                self._enter(request, request.num_computed_tokens - scheduled.get(request.request_id, 0))
        self._notice_freed(in_step=scheduled is not None)

    def _notice_freed(self, *, in_step: bool) -> None:
        """Count blocks that returned between two steps though no request ended, as a connector's blocks do."""
        free = self.pool.get_num_free_blocks()
        if free > self._free and not in_step and self.departed == self._departed_then:
            self.departed += 1
        self._free, self._departed_then = free, self.departed

    def leave(self, id: str) -> None:
        """Remove the entry of a request, if it has one."""
        slot = self._slots.pop(id, None)
        if slot is not None:
            self._hits.pop(id, None)
            self._forget(id)
            self.reserved -= int(self._kept[slot, RESERVED] + self._kept[slot, WINDOWED])
            self._unused.append(slot)
            others = self._order[self._order != slot]
            self._order = self._entries[: len(others)]
            self._order[:] = others
            self.departed += 1

    def reservation(self, request: Any) -> tuple[int, int]:
        """Return the upper bounds of the blocks the request ever holds, in full groups and in all others."""
        encoder = 0
        if self.scheduler.is_encoder_decoder:
            encoder = sum(request.get_num_encoder_embeds(at) for at in range(request.num_encoder_inputs))
        return self.groups.most_blocks(request.num_prompt_tokens + request.max_tokens, encoder)

    def snapshot(self) -> RunningSnapshot:
        """Return the counts of the running requests in vLLM's order; O(running)."""
        running, order, groups = self.scheduler.running, self._order, self.groups
        computed = np.fromiter(map(_COMPUTED, running), np.int32, len(running))
        find = self._tables.get
        tables = np.fromiter([len(find(request.request_id, ())) for request in running], np.int32, len(running))
        rows = np.empty((len(order), COLUMNS), np.int32)
        summarize(self._kept, order, computed, tables, groups.lookahead, groups.count, rows)
        windowed = int(self._kept[order, WINDOWED].sum()) if groups.others else 0
        used = self._used()
        if groups.others and not self.outsiders():
            used = min(used, int(rows[:, HELD].sum()))  # a window's prefix hit counts in `_used`
        return RunningSnapshot(groups.limits.usable_blocks, used, windowed, rows)

    def outsiders(self) -> bool:
        """Return whether a request that does not run may hold blocks.

        Such a request is a streaming session that waits for input, or its blocks are still loaded or sent by a
        connector.
        """
        scheduler = self.scheduler
        return bool(getattr(scheduler, scheduler._names.holders)) or scheduler.connector is not None

    def waste(self) -> int:
        """Return the token slots of full groups' blocks that hold no token; O(running).

        A shared block counts for each request that holds it.
        """
        computed = sum(int(request.num_computed_tokens) for request in self.scheduler.running)
        held = int(self.snapshot().held.sum())
        return max(0, held * self.groups.limits.layout.block_size - computed * self.groups.count)

    def broken(self) -> int:
        """Return the number of violated invariants; O(running).

        The sum of the reservations must be `reserved`, and each running request must hold at most its reserved
        blocks.
        """
        broken = reserved = 0
        for request in self.scheduler.running:
            row = self._kept[self._slots[request.request_id]]
            held = len(self._tables.get(request.request_id, ())) * self.groups.count
            broken += held > row[RESERVED]
            reserved += int(row[RESERVED] + row[WINDOWED])
        return int(broken) + (reserved != self.reserved)

    def leaving(self, snapshot: RunningSnapshot, fresh: Sequence[Hit]) -> Leaving:
        """Return the order in which requests can finish, and the blocks that each returns.

        This reads all block tables.

        Args:
            snapshot: the running requests, followed by the new ones.
            fresh: the prefix hits of the new requests.
        """
        tables = [self._tables.get(request.request_id, ()) for request in self.scheduler.running]
        tables += [hit.blocks for hit in fresh]
        blocks = np.array([block.block_id for table in tables for block in table], np.int32)
        owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        found = last_owners(snapshot, blocks, owners, self.pool.num_gpu_blocks)
        used = None if self.outsiders() or found.used is None else found.used * self.groups.count
        return Leaving(found.order, found.returns * self.groups.count, used)

    def find(self, request: Any) -> Hit:
        """Return what the request would find in the prefix cache now, without changing vLLM's statistics."""
        manager, full = self.scheduler.kv_cache_manager, self.groups.full
        if full is None or request.num_computed_tokens or not manager.enable_caching:
            return Hit()
        if request.skip_reading_prefix_cache:
            return Hit()
        found, tokens = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )[:2]
        blocks = found[full][: tokens // self.groups.limits.layout.block_size]
        used = sum(block.ref_cnt > 0 for block in blocks)
        return Hit(blocks, tokens, used, len(blocks) - used)

    def lost(self, hit: Hit) -> Int32Array | None:
        """Return the blocks of each running request that a new request would share (int32 [running]).

        Args:
            hit: the prefix that the new request finds.

        Returns:
            The blocks that stop being private to each request, or None when there are none.
        """
        if not hit.used:
            return None
        running = self.scheduler.running
        lost = np.zeros(len(running), np.int32)
        place = {request.request_id: at for at, request in enumerate(running)}
        for index, block in enumerate(hit.blocks):
            owner = self._owner_of(index, block) if block.ref_cnt > 0 else None
            if owner is not None:
                lost[place[owner]] += self.groups.count
        return lost

    def _owner_of(self, index: int, block: Any, newcomer: str = "") -> str | None:
        """Return the running request that alone holds the block at index `index` of a prefix, or None."""
        if self._shared.get(block.block_id) == block.block_hash:
            return None
        known = self._owner.get(block.block_id)
        for id in [known, *self._slots] if known in self._slots else self._slots:  # nearly always the first
            table = self._tables.get(id, ())
            if id != newcomer and index < len(table) and table[index] is block:
                return id
        return None

    def _enter(self, request: Any, hit: int) -> None:
        id, groups = request.request_id, self.groups
        self.found.setdefault(id, min(hit, request.num_prompt_tokens))
        if request.num_preemptions:
            self.recomputed += max(0, request.num_tokens - 1 - hit)
        full, windowed = self.reservation(request)
        shared = self._share(id, hit // groups.limits.layout.block_size) * groups.count
        slot = self._slots[id] = self._unused.pop()
        self._kept[slot] = (
            request.num_prompt_tokens, request.max_tokens, full, shared, request.num_tokens, windowed
        )  # fmt: skip
        self._order = self._entries[: len(self._order) + 1]
        self._order[-1] = slot
        if groups.others:
            self._hits[id] = hit
        self.reserved += full + windowed

    def _share(self, id: str, found: int) -> int:
        """Register the blocks of a new request; return how many of its first `found` blocks are shared."""
        table, shared = self._tables.get(id, ()), 0
        own = [block.block_id for block in table[found:]]
        for index, block in enumerate(table[:found]):
            if block.ref_cnt > 1:
                owner = self._owner_of(index, block, id)
                if owner is not None:
                    self._kept[self._slots[owner], SHARED] += self.groups.count
                self._shared[block.block_id] = block.block_hash
                shared += 1
            else:
                own.append(block.block_id)
        self._owner.update(dict.fromkeys(own, id))
        for number in own if self._shared else ():
            self._shared.pop(number, None)
        return shared

    def _forget(self, id: str) -> None:
        """Stop counting the blocks of an ended request as shared, where no other request holds them.

        A block may be allocated again for the same tokens and then belongs to one request. A connector may keep
        blocks longer than their request, so with one all blocks are removed: `private` is then too low, which
        is safe.
        """
        connected = self.scheduler.connector is not None
        for block in self._tables.get(id, ()) if self._shared else ():
            if connected or block.ref_cnt <= 1:
                self._shared.pop(block.block_id, None)

    def _used(self) -> int:
        """Return the referenced blocks of full groups, or an upper bound of them."""
        used = self.groups.limits.usable_blocks - int(self.pool.get_num_free_blocks())
        for other in self.groups.others:
            for request in self.scheduler.running:
                processed = request.num_computed_tokens - request.num_in_flight_tokens
                used -= other.own_blocks(
                    request.request_id, max(0, processed), self._hits.get(request.request_id, 0)
                )
        return used
