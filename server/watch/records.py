"""What a server tells once, and what one reading of it holds. None, or not there: the server does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tonnage.cache.admission import Limits
from tonnage.server.engines.stats import AutoStats
from tonnage.server.observe.metrics.headroom import Headroom


@dataclass(frozen=True, slots=True)
class Told:
    """What a server is: told at its start, the same until it is started again.

    ``title``: as its authors call it. ``model``: path or hub id of what it loaded, ``served``: its name in the
    API. ``flags``: fields of a Deployment by name, those that the server tells. ``pool_tokens`` of one
    replica, ``most_tokens``: where a flag limits them beside the memory. ``measured``: bytes by component that
    the server measured at its start. ``hidden``: components that do not follow from what it tells;
    ``assumed``: fields that it does not tell and that decide much.
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
    """KV blocks of one replica: ``used`` by running requests; ``cached`` can be given up at any time."""

    num_blocks: int
    usable: int
    block_size: int
    used: int | None = None
    cached: int | None = None

    @property
    def open(self) -> int | None:
        """Blocks that no running request holds."""
        return None if self.used is None else max(0, self.usable - self.used)


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine with a pool of its own. ``seats``: sequences it runs at once, where not those of the plan."""

    running: int | None
    waiting: int | None = None
    pool: Pool | None = None
    seats: int | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the start of the server. ``finished`` requests had ``finished_prompt`` and
    ``finished_generation`` tokens in all."""

    preemptions: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    finished: int | None = None
    finished_prompt: int | None = None
    finished_generation: int | None = None

    def since(self, before: Counters) -> Counters | None:
        """The differences; None where one fell: the server was started again."""
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
    """One look at a server. ``measured``: bytes by component of the plan. ``started``: whatever tells one run
    of the server from the next. ``typical``: prompt and completion of a request, where the server shows those
    it has now and counts none. ``headroom``, ``auto``: where the server itself knows."""

    replicas: tuple[Replica, ...]
    counters: Counters = field(default_factory=Counters)
    measured: Mapping[str, int] = field(default_factory=dict)
    started: str | None = None
    typical: tuple[float, float] | None = None
    headroom: Headroom | None = None
    auto: AutoStats | None = None

    def sum_of(self, name: str) -> int | None:
        """``running``, ``waiting`` of all replicas."""
        values = [getattr(replica, name) for replica in self.replicas]
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    def blocks(self, name: str) -> int | None:
        """A field of Pool over all replicas; None where one does not tell it."""
        values = [None if one.pool is None else getattr(one.pool, name) for one in self.replicas]
        return None if not values or None in values else sum(value for value in values if value is not None)


@dataclass(frozen=True, slots=True)
class Planned:
    """What the plan says of the rank that decides. ``components``: bytes by component, those that follow from
    what is known (without the device: weights only). ``num_blocks``, ``tokens`` of one pool: forecast from the
    flags, where they decide it or the device is known; ``replicas`` of the model. ``limits``: None where the
    server itself does the admission."""

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
