"""The Plan: computed once before anything loads, then what the pool is sized by, what admission reserves
from, and what the metrics compare reality with. Built by ``tonnage.planner.planning.build.make_plan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.capacity import (
    MixCapacity,
    RequestCapacity,
    at_most,
    capacity_line,
    check_lengths,
    hold,
    law_lines,
    mix_line,
)
from tonnage.planner.model.host import HostMemory
from tonnage.planner.model.layout import KVLayout
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.units import gib

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft beside the model: ``part``, its share of one rank; ``follows``: so many hidden states of a token
    it is given of the model's last layer, ``reads``: and those of so many inner layers."""

    part: Architecture
    follows: int = 0
    reads: int = 0


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Deployment without open questions: ``flags`` for the Plan, and its integers without None. ``limit``:
    bytes of the device that the plan may take. ``draft``: of --speculative-model, once it is known."""

    flags: Deployment
    version: tuple[int, int, int]
    device_memory: int
    limit: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    given_block_size: int | None = None
    draft: Drafting | None = None
    given_max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was planned. ``path`` is the local folder or file the engine loads from (not printed in JSON)."""

    id: str
    path: str
    architecture: str
    parameters: int
    attention: str  # MHA | GQA | MQA
    via: Literal["adapter", "headers", "index", "gguf", "meta"]
    max_model_len: int  # what the model itself allows
    vocab_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Bytes on one rank. ``total_bytes`` is the device; a negative ``free_bytes`` means: does not fit."""

    weights_bytes: int
    kv_pool_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    framework_bytes: int
    total_bytes: int
    lora_bytes: int = 0
    draft_bytes: int = 0  # weights of the speculative draft
    offloaded_bytes: int = 0  # weights kept in the host's memory, not on the device

    @property
    def components(self) -> dict[str, int]:
        """Bytes by what takes them on the device."""
        return {
            "weights": self.weights_bytes,
            "kv_pool": self.kv_pool_bytes,
            "activations": self.activation_bytes,
            "cuda_graphs": self.cuda_graph_bytes,
            "framework": self.framework_bytes,
            "lora": self.lora_bytes,
            "draft": self.draft_bytes,
        }

    @property
    def used_bytes(self) -> int:
        """What the processes of the server are expected to hold at their peak."""
        return sum(self.components.values())

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


def check_components(components: dict[str, int], rank: RankPlan) -> None:
    """The law of a rank's memory: its components, ``free`` among them, add up to the device, and whatever
    ``rank`` has a field of bytes for is in them. AssertionError where not."""
    elsewhere = {"total_bytes", "offloaded_bytes"}
    held = [getattr(rank, name) for name in rank.__match_args__ if name not in elsewhere]
    assert sum(components.values()) == rank.total_bytes, (components, rank)
    assert sum(held) == sum(components.values()) - components["free"], (components, rank)


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Capacity of the pool. ``usable_blocks`` = ``num_blocks`` - 1: block 0 is the null block."""

    layout: KVLayout
    num_blocks: int
    usable_blocks: int
    tokens: int
    max_concurrency: float
    bytes_per_sequence: int  # one sequence of max_model_len tokens
    longest: int | None = None  # most tokens of one sequence the usable blocks hold, at most max_model_len
    law: RequestLaw | None = None  # what a request takes by its lengths
    no_law: str = ""  # why that is not known


@dataclass(frozen=True, slots=True)
class Term:
    """One line of ``--explain``: value, formula with the numbers in it, the config field or source."""

    name: str
    value: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What stops a start. ``why``: and what would not, empty where it is that something does not fit;
    ``sentence``: the engine's own."""

    why: str
    sentence: str


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Weights of one rank stored in one dtype under one quantization (none: as trained)."""

    dtype: str
    quantization: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole answer. ``deployment`` has every None replaced by the value chosen."""

    plan_id: str
    revision: int
    model: ModelInfo
    deployment: Deployment
    ranks: tuple[RankPlan, ...]
    worst_rank: int
    kv_cache: KVCachePlan
    fits: bool
    reasons: tuple[str, ...] = ()
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # of what no file or flag decides
    terms: tuple[Term, ...] = ()
    weight_formats: tuple[WeightFormat, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader should know: rules assumed, settings that override
    advice: tuple[str, ...] = ()  # when it does not fit: changes that make it fit, smallest first
    schema_version: int = SCHEMA_VERSION
    stops_with: str | None = None  # what the engine says, when it does not start
    engine_name: str = ""  # as people call it: with its version, where it has one
    host: HostMemory | None = None  # beside the GPUs; None on a CPU, where the plan itself is of the host
    requests: tuple[RequestCapacity, ...] = ()  # of the lengths asked for
    mix: MixCapacity | None = None  # of a trace
    unsupported: tuple[
        str, ...
    ] = ()  # the ``reasons`` for which no memory would help: the engine does not run it

    @property
    def rank(self) -> RankPlan:
        """The rank that decides."""
        return self.ranks[self.worst_rank]

    @property
    def running(self) -> float:
        """Sequences of max_model_len tokens that run at once: what the pool holds, at most --max-num-seqs."""
        return at_most(self.kv_cache.max_concurrency, self.deployment.max_num_seqs)

    def hold(self, prompt_tokens: int, output_tokens: int) -> RequestCapacity:
        """How many requests of these lengths, none sharing a prefix, the pool holds at once.

        Raises DeploymentError for one longer than max_model_len, UnsupportedArchitecture where it is not known
        what a request takes.
        """
        if self.kv_cache.law is None:
            raise UnsupportedArchitecture(self.kv_cache.no_law, field="--request")
        check_lengths(prompt_tokens, output_tokens, self.deployment.max_model_len or 0)
        limit = 1 if self.deployment.max_num_seqs is None else self.deployment.max_num_seqs
        return hold(self.kv_cache.law, prompt_tokens, output_tokens, self.usable_bounds, limit)

    @property
    def usable_bounds(self) -> tuple[int, int, int]:
        """Usable blocks: as planned, the fewest and the most there may be."""
        cache = self.kv_cache
        empty = cache.num_blocks - cache.usable_blocks
        low, high = self.intervals.get("num_blocks", (cache.num_blocks, cache.num_blocks))
        return cache.usable_blocks, max(0, int(low) - empty), max(0, int(high) - empty)

    def headline(self) -> tuple[str, str]:
        """Two lines: the model, and how it is served."""
        model, flags = self.model, self.deployment
        first = f"{model.id}: {model.architecture}, {model.parameters:,} parameters, {model.attention}, "
        first += model.dtype + (f", {flags.quantization}" if flags.quantization else "") + f" (via {model.via})"
        second = (
            f"engine {self.engine_name} on {self.device_name()}, max_model_len {flags.max_model_len:,}, "
            f"max_num_seqs {flags.max_num_seqs:,}, block size {flags.block_size}"
        )
        return first, second

    def device_name(self) -> str:
        """The GPU with their number, or the device."""
        flags = self.deployment
        name = flags.gpu or flags.device
        if len(self.ranks) > 1:
            name = f"{len(self.ranks)} x {name}"
        return (
            f"{name} ({flags.data_parallel_size} replicas, each so)" if flags.data_parallel_size > 1 else name
        )

    def memory_rows(self) -> list[tuple[str, int, str]]:
        """(component, bytes, note) of the worst rank, in the order they are taken."""
        rank = self.rank

        def bounds(name: str) -> str:
            if name not in self.intervals:
                return "exact"
            low, high = self.intervals[name]
            return f"{gib(int(low))} to {gib(int(high))}"

        rows = [
            ("weights", rank.weights_bytes, bounds("weights_bytes")),
            ("KV cache pool", rank.kv_pool_bytes, bounds("kv_pool_bytes")),
            ("activations", rank.activation_bytes, bounds("activation_bytes")),
            ("framework", rank.framework_bytes, bounds("framework_bytes")),
        ]
        if rank.cuda_graph_bytes:
            rows.append(("CUDA graphs", rank.cuda_graph_bytes, bounds("cuda_graph_bytes")))
        if rank.lora_bytes:
            rows.append(("LoRA slots", rank.lora_bytes, "exact"))
        if rank.draft_bytes:
            rows.append(("draft model", rank.draft_bytes, bounds("draft_bytes")))
        rows.append(("free", rank.free_bytes, ""))
        rows.append(("device", rank.total_bytes, ""))
        return rows

    def capacity_lines(self) -> list[str]:
        """What the pool holds; the groups of a hybrid apart."""
        cache, layout, flags = self.kv_cache, self.kv_cache.layout, self.deployment
        if not layout.groups:
            return [f"KV cache: none (an encoder); at most {flags.max_num_seqs:,} texts in a step"]
        tokens, concurrency = f"{cache.tokens:,} tokens", f"{cache.max_concurrency:.2f}x"
        about = ""
        if "tokens" in self.intervals:
            about = "about "
            low, high = self.intervals["tokens"]
            tokens = f"about {tokens}, {low:,} to {high:,}"
            low, high = self.intervals["max_concurrency"]
            concurrency = f"about {concurrency}, {low:.2f} to {high:.2f}"
        limit = "" if self.running == cache.max_concurrency else f"; --max-num-seqs lets {self.running:,} run"
        lines = [
            f"KV cache: {about}{cache.num_blocks:,} blocks of {layout.bytes_per_block:,} bytes "
            f"({layout.dtype}), {cache.usable_blocks:,} usable; {tokens}",
            f"Concurrency at {flags.max_model_len:,} tokens per request: {concurrency} "
            f"({gib(cache.bytes_per_sequence)} each){limit}",
        ]
        if len(layout.groups) > 1 or layout.slides:
            for i, group in enumerate(layout.groups):
                window = f", window {group.window:,}" if group.window else ""
                lines.append(f"  group {i}: {group.kind}, {len(set(group.layers))} layers{window}")
        if cache.law is not None and (self.requests or cache.law.bends):
            lines += law_lines(cache.law, cache.usable_blocks, flags.max_num_seqs or 1)
        lines += [mix_line(self.mix, flags.max_num_seqs or 1)] if self.mix else []
        return lines + [capacity_line(request) for request in self.requests]

    def host_lines(self) -> list[str]:
        """What is held beside the GPUs."""
        host = self.host
        if host is None:
            return []
        if host.unknown:
            return [f"Host memory: not known: {host.unknown}"]
        line = f"Host memory: about {gib(host.value)}, {gib(host.low)} to {gib(host.high)}"
        if self.deployment.data_parallel_size > 1:
            line += " for each replica"
        if host.shared_bytes:
            line += f"; of it in /dev/shm up to {gib(host.shared_bytes)} (a container has 64 MiB unasked)"
        return [f"{line}; page cache of the files {gib(host.page_cache_bytes)}, which the kernel can take back"]

    def verdict_lines(self) -> list[str]:
        """Whether it fits, or why not and what would; notes."""
        lines = ["Fits."] if self.fits else [
            f"Does not {'run' if reason in self.unsupported else 'fit'}: {reason}" for reason in self.reasons
        ]  # fmt: skip
        if self.stops_with is not None:
            lines.append(f"{self.engine_name} stops with: {self.stops_with}")
        lines += [f"Would fit with {change}" for change in self.advice]
        return lines + [f"Note: {note}" for note in self.notes]

    def __repr__(self) -> str:
        """A few lines for people; the fields are in ``plan_to_dict``."""
        rows = [f"{name} {gib(size)}" for name, size, _ in self.memory_rows() if name != "device"]
        memory = f"{', '.join(rows)} of {gib(self.rank.total_bytes)}"
        verdict = "Fits." if self.fits else f"Does not fit: {'; '.join(self.reasons)}"
        return "\n  ".join(("<Plan", *self.headline(), memory, *self.capacity_lines()[:2], verdict)) + ">"

    def figures(self) -> list[tuple[str, str, str]]:
        """What people look for first: name, figure, its bounds or what it is of."""
        cache, flags, each = self.kv_cache, self.deployment, gib(self.rank.total_bytes)
        shown = [("device", self.device_name(), f"{each} each" if len(self.ranks) > 1 else each)]
        if not cache.layout.groups:
            return [*shown, ("texts in a step", f"{flags.max_num_seqs:,}", "an encoder: no KV cache")]
        tokens, many = "", ""
        if "tokens" in self.intervals:
            tokens = "{:,} to {:,}".format(*self.intervals["tokens"])
            many = "{:,.2f} to {:,.2f}".format(*self.intervals["max_concurrency"])
        running = f"{self.running:,.2f}".removesuffix(".00")
        return [
            *shown,
            ("tokens in the pool", f"{cache.tokens:,}", tokens),
            (f"sequences of {flags.max_model_len:,} tokens", f"{cache.max_concurrency:,.2f}", many),
            ("run at once", running, f"--max-num-seqs {flags.max_num_seqs:,}"),
        ]

    def html(self) -> str:
        """A section of a page: verdict, figures, the table with the memory bar, capacity."""
        from tonnage.planner.markup import memory_section  # for pages and notebooks alone

        rows = [row for row in self.memory_rows() if row[0] != "device"]
        said = self.verdict_lines()
        first = 1 if self.fits else len(self.reasons)
        verdict = (said[:first], self.fits)
        lines = (*self.capacity_lines(), *self.host_lines(), *said[first:])
        return memory_section(*self.headline(), verdict, self.figures(), rows, self.rank.total_bytes, lines)

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What a page says that the plan is about."""
        return ("model", self.model.id), ("engine", self.engine_name), ("device", self.device_name())

    def _repr_html_(self) -> str:
        """What a notebook shows; its style touches nothing outside it."""
        from tonnage.planner.markup import fragment  # for pages and notebooks alone

        return fragment(self.html())
