"""Records of a watched server: its facts, and one reading of its state; None means not reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tonnage.cache.admission import Limits
from tonnage.server.engines.stats import AutoStats, added
from tonnage.server.observe.metrics.headroom import Headroom


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a watched server that stay the same until it restarts.

    Attributes:
        title: name of the server software, such as vLLM.
        version: version of the server software.
        served: name of the model in the server's API.
        model: path or hub id of the model.
        flags: settings that the server reports, by field name of the Deployment.
        pool_tokens: number of token slots in one replica's KV pool.
        most_tokens: upper bound of the pool's tokens, which a flag of the server sets.
        measured: bytes that the server measured when it started, by memory component.
        hidden: memory components that cannot be planned from the reported facts.
        assumed: important fields of the Deployment that the server does not report; the plan uses their
            defaults.
        notes: notes for the user.
    """

    title: str
    version: str | None
    served: str | None
    model: str | None
    flags: Mapping[str, Any] = field(default_factory=dict)
    pool_tokens: int | None = None
    most_tokens: int | None = None
    measured: Mapping[str, int] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool of one replica of a watched server.

    `num_blocks` blocks exist, of which requests can use `usable`. Running requests hold `used`; `cached` can be
    evicted at any time. A block has `block_size` tokens.
    """

    num_blocks: int
    usable: int
    block_size: int
    used: int | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of a server, with its own KV pool and its numbers of running and waiting requests.

    `seats` is its limit of running sequences, or None when the plan's limit applies.
    """

    running: int | None
    waiting: int | None = None
    pool: Pool | None = None
    seats: int | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a server that start at zero when it starts.

    All `finished` requests together had `finished_prompt` prompt tokens and `finished_generation` output
    tokens.
    """

    preemptions: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    finished: int | None = None
    finished_prompt: int | None = None
    finished_generation: int | None = None

    def since(self, before: Counters) -> Counters | None:
        """Return the increase of each counter since an earlier reading.

        Returns None when a counter is lower than before, which means that the server restarted.
        """
        found = {}
        for part in fields(self):
            now, then = getattr(self, part.name), getattr(before, part.name)
            if now is None or then is None:
                continue
            if now < then:
                return None
            found[part.name] = now - then
        return Counters(**found)


@dataclass(frozen=True, slots=True)
class TierReading:
    """The KV tiers (host memory, disk) behind a server's KV pool; counters are zero when the server starts.

    Attributes:
        host_size: size of the tier in host memory, in bytes.
        host_used: bytes of the blocks in this tier.
        host_share: used fraction of this tier, for a server that reports tokens instead of bytes.
        disk_size: upper bound of the size of the disk tier, in bytes.
        disk_used: bytes that the disk tier uses.
        hit_tokens: prompt tokens that were loaded instead of computed.
        loaded_bytes: bytes loaded from host memory to the pool.
        stored_bytes: bytes stored from the pool to host memory.
        spent_seconds: seconds that the tiers cost, as far as the server reports them: copies between pool and
            tiers, and waits of requests for reads.
        saved_seconds: estimated seconds of prefill that the loaded tokens saved.
        token_seconds: measured seconds of prefill per computed prompt token, to estimate `saved_seconds`; None
            for a server that reports `saved_seconds` itself.
    """

    host_size: int | None = None
    host_used: int | None = None
    host_share: float | None = None
    disk_size: int | None = None
    disk_used: int | None = None
    hit_tokens: int | None = None
    loaded_bytes: int | None = None
    stored_bytes: int | None = None
    spent_seconds: float | None = None
    saved_seconds: float | None = None
    token_seconds: float | None = None

    @property
    def used_share(self) -> float | None:
        """Return the used fraction of the KV tier's host memory, or None when it is unknown."""
        if self.host_size and self.host_used is not None:
            return self.host_used / self.host_size
        return self.host_share

    def after(self, before: TierReading | None) -> TierReading:
        """Return this reading with `saved_seconds`: those of the earlier reading `before`, plus the new ones.

        The new ones are the tokens hit since `before`, times the prefill seconds per token measured now.
        Earlier hits are not valued again, so that the saved seconds never decrease.
        """
        if self.token_seconds is None or self.hit_tokens is None:
            return self
        if before is None or before.saved_seconds is None or before.hit_tokens is None:
            return replace(self, saved_seconds=self.hit_tokens * self.token_seconds)
        more = max(0, self.hit_tokens - before.hit_tokens) * self.token_seconds
        return replace(self, saved_seconds=before.saved_seconds + more)


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a watched server at one moment.

    Attributes:
        replicas: the server's engines, each with its KV pool and requests.
        counters: counters since the start of the server.
        measured: measured bytes by component of the plan.
        started: a value that changes when the server restarts, such as its start time.
        typical: average prompt and output tokens of the current requests, for a server that does not count
            finished requests.
        headroom: the headroom that the server itself reports.
        auto: the server's state of the admission mode `auto`.
        tier: the server's KV tiers, None without a tier.
    """

    replicas: tuple[Replica, ...]
    counters: Counters = field(default_factory=Counters)
    measured: Mapping[str, int] = field(default_factory=dict)
    started: float | str | None = None
    typical: tuple[float, float] | None = None
    headroom: Headroom | None = None
    auto: AutoStats | None = None
    tier: TierReading | None = None

    def sum_of(self, name: str) -> int | None:
        """Return the number of `running` or `waiting` requests, summed over all replicas that report it."""
        values = [getattr(replica, name) for replica in self.replicas]
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    def blocks(self, name: str) -> int | None:
        """Return the field `name` of Pool, summed over all replicas, or None when one does not report it."""
        values = [None if one.pool is None else getattr(one.pool, name) for one in self.replicas]
        return added(values) if values else None


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The figures of a plan that are compared with a watched server, for the rank with the highest memory use.

    Attributes:
        plan_id: id of the plan.
        model: id of the model.
        architecture: architecture of the model, as in its config.json.
        engine: name of the engine that the plan is for.
        quantization: method of quantization, or "none".
        device: name of the device, such as `cuda:0`.
        components: planned bytes by component. Without a known device, only components that do not depend on
            it.
        block_size: number of tokens per KV block.
        bytes_per_block: bytes of a KV block.
        max_model_len: maximum number of tokens of a sequence.
        num_blocks: KV blocks of one replica's pool, None when neither flags nor device determine them.
        tokens: token slots of one replica's pool, None when neither flags nor device determine them.
        replicas: number of replicas of the model.
        limits: limits that admission uses, None when the server itself reports its headroom.
        revision: revision of the plan: 0 before the load, 1 after it.
        notes: notes for the user.
    """

    plan_id: str
    model: str
    architecture: str
    engine: str
    quantization: str
    device: str
    components: Mapping[str, int]
    block_size: int
    bytes_per_block: int
    max_model_len: int | None = None
    num_blocks: int | None = None
    tokens: int | None = None
    replicas: int = 1
    limits: Limits | None = None
    revision: int = 0
    notes: tuple[str, ...] = ()
