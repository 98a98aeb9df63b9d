"""The KV block accounting for admission: reservations and blocks of the requests that vLLM runs.

When a request starts, the account adds an entry with its reservation, prompt length and prefix hit. Three
values are read from vLLM at each step: the computed tokens and the block table length of each request, and the
pool's free blocks. The blocks of a table are read only when a new request has a prefix hit. A step costs a few
array operations.

A block that two requests reference does not return to the pool when one of them ends. When a new request hits a
block that is in use, the block counts as shared until no request holds it. So the number of a request's
`private` blocks is exact or too low, and too low is safe (`tonnage.cache.admission.snapshot`).
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

# Columns of an entry. `tonnage.cache.admission.loops.summarize` reads the first five; RESERVED and SHARED are
# numbers of blocks in full-attention groups. WINDOWED is the number of blocks in all other groups; they are
# reserved when the request starts.
PROMPT, MAX_TOKENS, RESERVED, SHARED, PREFILL_END, WINDOWED = range(6)
_COMPUTED = attrgetter("num_computed_tokens")


@dataclass(frozen=True, slots=True)
class Hit:
    """The part of a waiting request's prompt that is in vLLM's prefix cache now.

    Attributes:
        blocks: vLLM's block objects in the first full-attention group.
        tokens: prompt tokens that need not be computed.
        used: number of these blocks that running requests hold, for one full-attention group.
        cached: number of these blocks that no request references, for one full-attention group.
    """

    blocks: Sequence[Any] = ()
    tokens: int = 0
    used: int = 0
    cached: int = 0


class Account:
    """The KV block accounting of vLLM's running requests (`scheduler.running`), with one entry per request.

    Call `leave` when a request ends or is preempted, and `sync` before and after a step.
    """

    def __init__(self, scheduler: Any, groups: Groups) -> None:
        self.scheduler, self.groups = scheduler, groups
        self.pool = scheduler.kv_cache_manager.block_pool
        self.reserved = 0  # reserved blocks of all KV cache groups and all entries.
        # Number of events that freed blocks: each removed entry is one. If the pool gained free blocks between
        # two steps although no request ended, this is one, too.
        self.departed = 0
        self._free = self.pool.get_num_free_blocks()  # number of free blocks in vLLM's pool at the last `sync`
        self._departed_then = 0  # value of `departed` at the last `sync`.
        # For each unfinished request, by id: the number of prompt tokens that were in the prefix cache when the
        # request first started.
        self.found: dict[str, int] = {}
        self.recomputed = 0  # tokens that preempted requests have had to compute again
        self._slots: dict[str, int] = {}
        # By request id, the number of tokens found in the prefix cache. It is only kept if one of the KV cache
        # groups lacks full attention.
        self._hits: dict[str, int] = {}
        self._unused = list(range(groups.limits.max_num_seqs - 1, -1, -1))
        self._kept = np.zeros((groups.limits.max_num_seqs, 6), np.int32)
        # Row numbers of the entries, in the order of ``scheduler.running``. ``_order`` is the used part of the
        # preallocated ``_entries``.
        self._entries = np.zeros(groups.limits.max_num_seqs, np.int32)
        self._order = self._entries[:0]
        # Both dictionaries map block ids of the first full-attention group. ``_owner`` maps a block to the
        # request whose prompt filled it, which may have ended. ``_shared`` maps each shared block to its
        # content hash: a block whose hash has changed is no longer shared.
        self._owner: dict[int, str] = {}
        self._shared: dict[int, Any] = {}
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._tables: Any = {} if groups.full is None else managers[groups.full].req_to_blocks

    def __len__(self) -> int:
        return len(self._slots)

    def sync(self, scheduled: dict[str, int] | None = None) -> None:
        """Remove the entries of requests that no longer run, and add entries for requests that have started.

        Args:
            scheduled: number of tokens of each request in the step just scheduled. None before a step; then no
                entry is added.
        """
        running = self.scheduler.running
        if len(self._slots) > len(running):
            here = {request.request_id for request in running}
            for id in [id for id in self._slots if id not in here]:
                self.leave(id)
        if scheduled is not None and len(self._slots) < len(running):
            known = self._slots
            fresh = list(takewhile(lambda request: request.request_id not in known, reversed(running)))
            # Add entries in the order of start, because a request may share blocks with an earlier request.
            for request in reversed(fresh):
                self._enter(request, request.num_computed_tokens - scheduled.get(request.request_id, 0))
        self._notice_freed(in_step=scheduled is not None)

    def _notice_freed(self, *, in_step: bool) -> None:
        """Count a departure if KV blocks returned to the pool between two steps although no request ended.

        A KV connector, for example, returns blocks later than their request ends.
        """
        free = self.pool.get_num_free_blocks()
        if free > self._free and not in_step and self.departed == self._departed_then:
            self.departed += 1
        self._free, self._departed_then = free, self.departed

    def leave(self, id: str) -> None:
        """Remove a request from the block accounting; do nothing if it is not there."""
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
        """Return upper bounds of a request's KV blocks: (in full-attention groups, in all other groups)."""
        encoder = 0
        if self.scheduler.is_encoder_decoder:
            encoder = sum(request.get_num_encoder_embeds(at) for at in range(request.num_encoder_inputs))
        return self.groups.most_blocks(request.num_prompt_tokens + request.max_tokens, encoder)

    def snapshot(self) -> RunningSnapshot:
        """Return the running requests' KV block counts, in the order of `scheduler.running`; O(running)."""
        running, order, groups = self.scheduler.running, self._order, self.groups
        computed = np.fromiter(map(_COMPUTED, running), np.int32, len(running))
        find = self._tables.get
        tables = np.fromiter([len(find(request.request_id, ())) for request in running], np.int32, len(running))
        rows = np.empty((len(order), COLUMNS), np.int32)
        summarize(self._kept, order, computed, tables, groups.lookahead, groups.count, rows)
        windowed = int(self._kept[order, WINDOWED].sum()) if groups.others else 0
        used = self._used()
        if groups.others and not self.outsiders():
            # In sliding-window groups, `_used` may count blocks of prefix hits too. So bound it by the number
            # of blocks that the requests hold in full-attention groups.
            used = min(used, int(rows[:, HELD].sum()))
        return RunningSnapshot(groups.limits.usable_blocks, used, windowed, rows)

    def outsiders(self) -> bool:
        """Return whether a request that is not running may hold KV blocks.

        Such a request may be a streaming session that waits for input, or one whose blocks a KV connector still
        loads or sends.
        """
        scheduler = self.scheduler
        return bool(getattr(scheduler, scheduler._names.holders)) or scheduler.connector is not None

    def waste(self) -> int:
        """Return the token slots without a token in used blocks of full-attention groups; O(running).

        The slots of a shared block count once for each request that holds it.
        """
        computed = sum(int(request.num_computed_tokens) for request in self.scheduler.running)
        held = int(self.snapshot().held.sum())
        return max(0, held * self.groups.limits.layout.block_size - computed * self.groups.count)

    def broken(self) -> int:
        """Return the number of violated invariants of the accounting; O(running).

        The sum of the reservations must be `reserved`, and no running request may hold more blocks than it has
        reserved.
        """
        broken = reserved = 0
        for request in self.scheduler.running:
            row = self._kept[self._slots[request.request_id]]
            held = len(self._tables.get(request.request_id, ())) * self.groups.count
            broken += held > row[RESERVED]
            reserved += int(row[RESERVED] + row[WINDOWED])
        return int(broken) + (reserved != self.reserved)

    def leaving(self, snapshot: RunningSnapshot, fresh: Sequence[Hit]) -> Leaving:
        """Return an order in which the requests can finish, and how many KV blocks each then returns.

        The method reads all block tables.

        Args:
            snapshot: the running requests, followed by the new requests.
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
        """Return the request's current prefix hit, without changing vLLM's prefix cache statistics."""
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
        """Return how many private blocks of each running request a new request would share, int32 [running].

        Args:
            hit: the prefix hit of a new request, which would share the hit's blocks.

        Returns:
            The number of blocks per running request, or None if the hit has no block in use.
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
        """Return the id of the only running request that holds a KV block; None if several hold it, or none.

        Args:
            index: index of the block in the block table.
            block: vLLM's block object.
            newcomer: id of a new request to ignore.
        """
        if self._shared.get(block.block_id) == block.block_hash:
            return None
        known = self._owner.get(block.block_id)
        # First try the request whose prompt filled the block, because nearly always it is the holder.
        for id in [known, *self._slots] if known in self._slots else self._slots:
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
        """Record the KV blocks of a new request; return how many of its first `found` blocks are shared.

        The first `found` blocks of its block table are its prefix hit.
        """
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
        """Stop counting blocks of an ended request as shared if no other request holds them.

        Otherwise a block that is later allocated for equal tokens would still count as shared. A KV connector
        may keep blocks after their request has ended. So with a connector, all blocks of the ended request stop
        counting as shared. The number of `private` blocks is then too low, which is safe.
        """
        connected = self.scheduler.connector is not None
        for block in self._tables.get(id, ()) if self._shared else ():
            if connected or block.ref_cnt <= 1:
                self._shared.pop(block.block_id, None)

    def _used(self) -> int:
        """Return how many KV blocks of full-attention groups are referenced, or an upper bound of it."""
        used = self.groups.limits.usable_blocks - int(self.pool.get_num_free_blocks())
        for other in self.groups.others:
            for request in self.scheduler.running:
                processed = request.num_computed_tokens - request.num_in_flight_tokens
                used -= other.own_blocks(
                    request.request_id, max(0, processed), self._hits.get(request.request_id, 0)
                )
        return used
