"""Result types of memory planning: a `Plan` and its parts.

A plan is computed once, before anything loads. It determines the server's KV pool size, the reservations of
admission, and the metrics that compare plan and measurement. `tonnage.planner.planning.build.make_plan` builds
plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
from tonnage.planner.model.tier import KVTier
from tonnage.planner.units import MiB, gib

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """The draft (a draft model, or the checkpoint's MTP layers) for speculative decoding, on one rank.

    Attributes:
        part: the part of the draft's tensors that one rank holds.
        follows: number of hidden states of the model's last layer that the draft reads per token.
        reads: number of hidden states of inner layers that the draft reads per token.
    """

    part: Architecture
    follows: int = 0
    reads: int = 0


@dataclass(frozen=True, slots=True)
class Resolved:
    """A `Deployment` with a concrete value for every setting that the user left to the engine.

    Attributes:
        flags: the `Deployment` with the chosen values, as the plan reports it.
        version: version of the engine as (major, minor, patch).
        device_memory: total bytes of the device's memory.
        limit: bytes of device memory that the plan may use.
        max_model_len: longest sequence in tokens.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens per step.
        block_size: tokens per KV block.
        given_block_size: the --block-size that was requested, or None.
        draft: the draft of --speculative-model; None without a draft model or before its files are read.
        given_max_num_seqs: the --max-num-seqs that was requested, or None.
        memory_bounds: ((bytes, limit), (bytes, limit)): the smallest and the largest `device_memory` with the
            `limit` that follows from each. It is set if drivers report different totals or the total is
            assumed; None if the total is known.
    """

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
    memory_bounds: tuple[tuple[int, int], tuple[int, int]] | None = None

    @property
    def memory_ends(self) -> tuple[Resolved, Resolved]:
        """Return copies of the deployment with the smallest and the largest possible device memory."""
        if self.memory_bounds is None:
            return self, self
        (low, low_limit), (high, high_limit) = self.memory_bounds
        return (
            replace(self, device_memory=low, limit=low_limit),
            replace(self, device_memory=high, limit=high_limit),
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model of a plan: its name, the source of its tensor shapes, and its size.

    Attributes:
        path: local folder or file from which the engine loads; not part of the JSON.
        active_parameters: parameters used per token, which excludes experts that the router does not select;
            not part of the JSON.
        attention: MHA, GQA, MQA, MLA or none.
        via: the source of the tensor shapes: a model adapter, safetensors headers, a checkpoint index, a GGUF
            file, or an instance on PyTorch's meta device.
        max_model_len: longest sequence that the model itself allows, in tokens.
    """

    id: str
    path: str
    architecture: str
    parameters: int
    active_parameters: int
    attention: str
    via: Literal["adapter", "headers", "index", "gguf", "meta"]
    dtype: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Planned bytes of one rank's device memory, by component (weights, KV pool, activations and others).

    Attributes:
        total_bytes: total bytes of the device's memory.
        draft_bytes: bytes of the speculative draft's weights.
        offloaded_bytes: bytes of weights kept in host memory, not on the device.
        kv_tier_bytes: bytes of the host KV tier if the device is a CPU, whose memory holds the tier; else 0.
    """

    weights_bytes: int
    kv_pool_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    framework_bytes: int
    total_bytes: int
    lora_bytes: int = 0
    draft_bytes: int = 0
    offloaded_bytes: int = 0
    kv_tier_bytes: int = 0

    @property
    def components(self) -> dict[str, int]:
        """Return component name -> bytes, for each part of the plan that occupies device memory."""
        return {
            "weights": self.weights_bytes,
            "kv_pool": self.kv_pool_bytes,
            "activations": self.activation_bytes,
            "cuda_graphs": self.cuda_graph_bytes,
            "framework": self.framework_bytes,
            "lora": self.lora_bytes,
            "draft": self.draft_bytes,
            "kv_tier": self.kv_tier_bytes,
        }

    @property
    def used_bytes(self) -> int:
        """Return the bytes of device memory that the server's processes are expected to hold at their peak."""
        return sum(self.components.values())

    @property
    def free_bytes(self) -> int:
        """Return the unused bytes of device memory; the number is negative if the plan does not fit."""
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Planned size of the KV block pool, in bytes and blocks, and its capacity in tokens and sequences.

    Attributes:
        usable_blocks: `num_blocks` - 1, because block 0 is the null block.
        bytes_per_sequence: KV cache bytes that one sequence of max_model_len tokens takes.
        longest: longest sequence in tokens that the usable blocks hold, at most max_model_len.
        law: rule that gives the number of KV blocks of a request from its prompt and output tokens, or None if
            it is not known for the model.
        no_law: the reason why `law` is None; empty if `law` is set.
    """

    layout: KVLayout
    num_blocks: int
    usable_blocks: int
    tokens: int
    max_concurrency: float
    bytes_per_sequence: int
    longest: int | None = None
    law: RequestLaw | None = None
    no_law: str = ""


@dataclass(frozen=True, slots=True)
class Term:
    """One line of `--explain`: a number of the plan, its formula, and its source (config field or file)."""

    name: str
    value: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The predicted failure of an engine's start, with the engine's own error message.

    Attributes:
        why: the planner's explanation and remedy. It is empty if the cause is a lack of memory, which other
            `reasons` of the plan explain.
        sentence: the engine's own error message.
    """

    why: str
    sentence: str


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A storage format (dtype and quantization) and the bytes of one rank's weights that have this format.

    The quantization is `none` for unquantized weights.
    """

    dtype: str
    quantization: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan of one deployment.

    Attributes:
        deployment: the flags, with every None replaced by the chosen value.
        worst_rank: index of the rank that uses the most device memory, which decides whether the plan fits.
        reasons: why the plan does not fit.
        intervals: name of each estimated number -> (lower bound, upper bound).
        notes: assumptions of the plan, and settings that override others.
        advice: if the plan does not fit, changes that make it fit, smallest first.
        stops_with: the engine's own error message if it is predicted to stop at start-up, else None.
        engine_name: title of the engine, with its version if it has one.
        host: host memory that serving on GPUs needs; None on a CPU, where the whole plan is about host memory.
        tiers: KV tiers in host memory or on disk, in addition to the KV pool.
        requests: how many requests the KV pool holds at once, for each (prompt, output) length of `--request`.
        mix: how many requests of a trace (`--trace`) the KV pool holds at once.
        unsupported: the `reasons` that more memory would not remove, because the engine does not run the model.
        defaults: fields of `deployment` that were not given; a serve command need not repeat them.
        unknown: reasons why it is not known whether the engine runs the model on this device; empty if it is
            known.
    """

    plan_id: str
    revision: int
    model: ModelInfo
    deployment: Deployment
    ranks: tuple[RankPlan, ...]
    worst_rank: int
    kv_cache: KVCachePlan
    fits: bool
    reasons: tuple[str, ...] = ()
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    terms: tuple[Term, ...] = ()
    weight_formats: tuple[WeightFormat, ...] = ()
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION
    stops_with: str | None = None
    engine_name: str = ""
    host: HostMemory | None = None
    tiers: tuple[KVTier, ...] = ()
    requests: tuple[RequestCapacity, ...] = ()
    mix: MixCapacity | None = None
    unsupported: tuple[str, ...] = ()
    defaults: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()

    @property
    def rank(self) -> RankPlan:
        """Return the planned bytes of the rank with the most used memory, which decides the verdict."""
        return self.ranks[self.worst_rank]

    @property
    def running(self) -> float:
        """Return how many sequences of max_model_len tokens run at once, limited by --max-num-seqs."""
        return at_most(self.kv_cache.max_concurrency, self.deployment.max_num_seqs)

    def hold(self, prompt_tokens: int, output_tokens: int) -> RequestCapacity:
        """Return how many requests of one length the KV pool holds at once if they share no prefix.

        Args:
            prompt_tokens: tokens of each prompt.
            output_tokens: tokens of each answer.

        Raises:
            DeploymentError: a request is longer than max_model_len.
            UnsupportedArchitecture: the blocks that a request of this model needs are not known.
        """
        if self.kv_cache.law is None:
            raise UnsupportedArchitecture(self.kv_cache.no_law, field="--request")
        check_lengths(prompt_tokens, output_tokens, self.deployment.max_model_len or 0)
        limit = 1 if self.deployment.max_num_seqs is None else self.deployment.max_num_seqs
        return hold(self.kv_cache.law, prompt_tokens, output_tokens, self.usable_bounds, limit)

    @property
    def usable_bounds(self) -> tuple[int, int, int]:
        """Return the number of usable KV blocks as (planned number, lower bound, upper bound)."""
        cache = self.kv_cache
        empty = cache.num_blocks - cache.usable_blocks
        low, high = self.intervals.get("num_blocks", (cache.num_blocks, cache.num_blocks))
        return cache.usable_blocks, max(0, int(low) - empty), max(0, int(high) - empty)

    def headline(self) -> tuple[str, str]:
        """Return two lines: one describes the model, the other the engine, device and main limits."""
        model, flags = self.model, self.deployment
        first = f"{model.id}: {model.architecture}, {model.parameters:,} parameters, {model.attention}, "
        first += model.dtype + (f", {flags.quantization}" if flags.quantization else "") + f" (via {model.via})"
        step = ""
        if flags.max_num_batched_tokens is not None:
            step = f"max_num_batched_tokens {flags.max_num_batched_tokens:,}, "
        second = (
            f"engine {self.engine_name} on {self.device_name()}, max_model_len {flags.max_model_len:,}, "
            f"max_num_seqs {flags.max_num_seqs:,}, {step}block size {flags.block_size}"
        )
        return first, second

    def device_name(self) -> str:
        """Return the GPU's name, or the device's without a GPU, with the count: `2 x h100-80g`."""
        flags = self.deployment
        name = flags.gpu or flags.device
        if len(self.ranks) > 1:
            name = f"{len(self.ranks)} x {name}"
        return (
            f"{name} ({flags.data_parallel_size} replicas of this plan)"
            if flags.data_parallel_size > 1
            else name
        )

    def memory_rows(self) -> list[tuple[str, int, str]]:
        """Return the memory table of the rank that uses the most memory, as rows (component, bytes, note).

        The rows are weights, KV pool, other components, free memory and the device's total.
        """
        rank = self.rank

        def bounds(name: str) -> str:
            if name not in self.intervals:
                return "exact"
            low, high = map(int, self.intervals[name])
            if gib(low) == gib(high):  # Both bounds round to the same text, so print it once.
                return f"{gib(low)}, within {(high - low) / MiB:,.1f} MiB"
            return f"{gib(low)} to {gib(high)}"

        rows = [
            ("weights", rank.weights_bytes, bounds("weights_bytes")),
            ("KV cache pool", rank.kv_pool_bytes, bounds("kv_pool_bytes")),
            ("activations", rank.activation_bytes, bounds("activation_bytes")),
            ("framework", rank.framework_bytes, bounds("framework_bytes")),
        ]
        optional = (
            ("CUDA graphs", rank.cuda_graph_bytes, bounds("cuda_graph_bytes")),
            ("LoRA slots", rank.lora_bytes, "exact"),
            ("draft model", rank.draft_bytes, bounds("draft_bytes")),
            ("KV tier", rank.kv_tier_bytes, "exact"),
        )
        count = len(self.ranks) * self.deployment.data_parallel_size
        whose = "each" if all(other == rank for other in self.ranks) else "the fullest"
        return [
            *rows,
            *(row for row in optional if row[1]),
            ("free", rank.free_bytes, ""),
            ("device", rank.total_bytes, f"{whose} of {count} GPUs" if count > 1 else ""),
        ]

    def capacity_lines(self) -> list[str]:
        """Return lines of text about the KV pool: blocks, tokens, concurrent sequences and layer groups."""
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
        each = "" if layout.bytes_per_token is None else f", {layout.bytes_per_token:,} a token"
        limit = "" if self.running == cache.max_concurrency else f"; --max-num-seqs lets {self.running:,} run"
        lines = [
            f"KV cache: {about}{cache.num_blocks:,} blocks of {layout.bytes_per_block:,} bytes "
            f"({layout.dtype}{each}), {cache.usable_blocks:,} usable; {tokens}",
            f"Concurrency at {flags.max_model_len:,} tokens per request: {concurrency} "
            f"({gib(cache.bytes_per_sequence)} each){limit}",
        ]
        if (copies := flags.data_parallel_size) > 1:
            gpus, held = copies * len(self.ranks), copies * cache.tokens
            lines.append(
                f"All {copies} replicas, {gpus} GPUs: {about}{held:,} tokens, "
                f"{copies * cache.max_concurrency:.2f} sequences of {flags.max_model_len:,} tokens"
            )
        if len(layout.groups) > 1 or layout.slides:
            for i, group in enumerate(layout.groups):
                window = f", window {group.window:,}" if group.window else ""
                lines.append(f"  group {i}: {group.kind}, {len(set(group.layers))} layers{window}")
        if cache.law is not None and (self.requests or not cache.law.is_linear):
            lines += law_lines(cache.law, cache.usable_blocks, flags.max_num_seqs or 1)
        lines += [mix_line(self.mix, flags.max_num_seqs or 1)] if self.mix else []
        return lines + [capacity_line(request) for request in self.requests]

    def host_lines(self) -> list[str]:
        """Return lines of text about KV tiers and about the host memory that serving on GPUs needs."""
        host, found = self.host, [line for tier in self.tiers for line in tier.lines()]
        if host is None:
            return found
        if host.unknown:
            return [*found, f"Host memory: not known: {host.unknown}"]
        line = f"Host memory: about {gib(host.value)}, {gib(host.low)} to {gib(host.high)}"
        if self.deployment.data_parallel_size > 1:
            line += " for each replica"
        if host.shared_bytes:
            line += f"; of it in /dev/shm up to {gib(host.shared_bytes)} (a container has 64 MiB by default)"
        line += f"; page cache of the files {gib(host.page_cache_bytes)}, which the kernel can reclaim"
        return [*found, line]

    def verdict(self) -> str:
        """Return, as text, the verdict on a plan that fits in the device memory."""
        if not self.unknown:
            return "Fits."
        return f"The memory suffices; it is not known whether it runs: {'; '.join(self.unknown)}"

    def verdict_lines(self) -> list[str]:
        """Return lines of text: the verdict or the reasons why the plan does not fit, advice, and notes."""
        lines = [self.verdict()] if self.fits else [
            f"Does not {'run' if reason in self.unsupported else 'fit'}: {reason}" for reason in self.reasons
        ]  # fmt: skip
        if self.stops_with is not None:
            lines.append(f"{self.engine_name} stops with: {self.stops_with}")
        lines += [f"Would fit with {change}" for change in self.advice]
        return lines + [f"Note: {note}" for note in self.notes]

    def __repr__(self) -> str:
        """Return a short readable summary of the plan; `plan_to_dict` returns all of its fields."""
        rows = [f"{name} {gib(size)}" for name, size, _ in self.memory_rows() if name != "device"]
        memory = f"{', '.join(rows)} of {gib(self.rank.total_bytes)}"
        verdict = self.verdict() if self.fits else f"Does not fit: {'; '.join(self.reasons)}"
        return "\n  ".join(("<Plan", *self.headline(), memory, *self.capacity_lines()[:2], verdict)) + ">"

    def figures(self) -> list[tuple[str, str, str]]:
        """Return the most important numbers of the plan, each as (name, number, bounds or unit)."""
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
        """Return an HTML section that shows the plan: verdict, main figures, memory table, and capacity."""
        from tonnage.planner.markup import memory_section  # lazy import, only for HTML

        rows = [row for row in self.memory_rows() if row[0] != "device"]
        said = self.verdict_lines()
        first = 1 if self.fits else len(self.reasons)
        verdict = (said[:first], self.fits)
        lines = (*self.capacity_lines(), *self.host_lines(), *said[first:])
        return memory_section(*self.headline(), verdict, self.figures(), rows, self.rank.total_bytes, lines)

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return (name, value) pairs about model, engine and device, for the head of the plan's HTML page."""
        return ("model", self.model.id), ("engine", self.engine_name), ("device", self.device_name())

    def _repr_html_(self) -> str:
        """Return the plan as HTML for a notebook's cell; the CSS rules apply only to this HTML."""
        from tonnage.planner.markup import fragment  # lazy import, only for HTML

        return fragment(self.html())
