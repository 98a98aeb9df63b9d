"""The facts about a watched server, and one reading of its state. None means not reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tonnage.cache.admission import Limits
from tonnage.server.engines.stats import AutoStats
from tonnage.server.observe.metrics.headroom import Headroom


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a server that stay the same until it restarts.

    Attributes:
        title: name of the server software.
        version: its version.
        served: name of the model in the API.
        model: path or hub id of the model.
        flags: reported fields of the Deployment by name.
        pool_tokens: token slots of one replica's pool.
        most_tokens: limit of the pool's tokens by a flag.
        measured: bytes by component that the server measured at its start.
        hidden: components that cannot be planned from the facts.
        assumed: important fields of the Deployment that the server does not report.
        notes: notes for the reader.
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
    """The KV blocks of one replica: `used` by running requests, `cached` and evictable at any time."""

    num_blocks: int
    usable: int
    block_size: int
    used: int | None = None
    cached: int | None = None

    @property
    def open(self) -> int | None:
        """Return the blocks that no running request holds."""
        return None if self.used is None else max(0, self.usable - self.used)


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine with its own pool; `seats` is its limit of running sequences if it is not the plan's."""

    running: int | None
    waiting: int | None = None
    pool: Pool | None = None
    seats: int | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since the start of the server.

    `finished` requests had `finished_prompt` and `finished_generation` tokens in total.
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
        """Return the differences to an earlier reading, or None when a counter fell after a restart."""
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
class Reading:
    """The state of a server at one moment.

    Attributes:
        replicas: the engines.
        counters: counts since the start.
        measured: bytes by component of the plan.
        started: a value that differs between two runs of the server.
        typical: prompt and output tokens of a current request, for a server without counters of finished ones.
        headroom: the server's own figure.
        auto: the server's own state of the admission mode `auto`.
    """

    replicas: tuple[Replica, ...]
    counters: Counters = field(default_factory=Counters)
    measured: Mapping[str, int] = field(default_factory=dict)
    started: str | None = None
    typical: tuple[float, float] | None = None
    headroom: Headroom | None = None
    auto: AutoStats | None = None

    def sum_of(self, name: str) -> int | None:
        """Return `running` or `waiting`, summed over all replicas that report it."""
        values = [getattr(replica, name) for replica in self.replicas]
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    def blocks(self, name: str) -> int | None:
        """Return a field of Pool summed over all replicas, or None when one does not report it."""
        values = [None if one.pool is None else getattr(one.pool, name) for one in self.replicas]
        return None if not values or None in values else sum(value for value in values if value is not None)


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The plan of the worst rank.

    Attributes:
        plan_id: id of the plan.
        model: id of the model.
        architecture: its architecture.
        engine: the engine that is planned for.
        quantization: quantization or "none".
        device: name of the device.
        components: bytes by component, as far as they are known (without the device: weights only).
        block_size: tokens of a block.
        bytes_per_block: bytes of a block.
        max_model_len: longest sequence.
        num_blocks: blocks of one pool, if the flags or the device determine them.
        tokens: token slots of one pool, likewise.
        replicas: replicas of the model.
        limits: limits of admission, None when the server itself reports its headroom.
        revision: revision of the plan.
        notes: notes for the reader.
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
