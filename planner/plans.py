"""The Plan: computed once before anything loads, then what the pool is sized by, what admission reserves
from, and what the metrics compare reality with. Built by :func:`tonnage.planner.build.make_plan`."""

from __future__ import annotations

from typing import Literal

from tonnage.planner.layout import KVLayout
from tonnage.planner.records import dataclass, field

SCHEMA_VERSION = 1

EngineName = Literal["hf", "vllm", "sglang", "llama.cpp"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """How the model is to be served; field names are vLLM's flags. None means: let the planner choose."""

    engine: EngineName = "hf"
    engine_version: str | None = None  # whose rules; None: the installed one, else the newest known
    device: str = "cpu"
    gpu: str | None = None  # a name of planner/gpus/catalogue.json
    device_memory: int | None = None  # bytes of the device (or of the host for cpu)
    gpu_memory_utilization: float | None = None  # None: the engine's default
    dtype: str = "auto"  # auto | float32 | float16 | bfloat16
    quantization: str | None = None  # int8 | nf4 | nf4-double | gptq | None (what the checkpoint says)
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool | None = None  # None: the engine's default for this model
    num_gpu_blocks_override: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    decode_context_parallel_size: int = 1
    enforce_eager: bool = False
    cpu_offload_bytes: int = 0  # vLLM: --cpu-offload-gb (GiB), per GPU
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    speculative_model: str | None = None  # a model, or "mtp" for the checkpoint's own draft layers
    num_speculative_tokens: int = 0
    mem_fraction_static: float | None = None  # SGLang
    swa_full_tokens_ratio: float = 0.8  # SGLang (server_args.py): sliding tokens for each one of the full pool


def default_engine(gpu: str | None, engine_version: str | None) -> EngineName:
    """Whose rules are meant where nothing says so: vLLM's with a GPU or a version, else the hf engine's."""
    return "vllm" if gpu not in (None, "cpu") or engine_version is not None else "hf"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was planned. ``path`` is the local folder or file the engine loads from (not printed in JSON)."""

    id: str
    path: str
    architecture: str
    parameters: int
    attention: str  # MHA | GQA | MQA
    via: Literal["adapter", "headers", "gguf", "meta"]
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


@dataclass(frozen=True, slots=True)
class Term:
    """One line of ``--explain``: value, formula with the numbers in it, the config field or source."""

    name: str
    value: int
    formula: str
    source: str


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
    intervals: dict[str, tuple[int, int]] = field(default_factory=dict)
    terms: tuple[Term, ...] = ()
    weight_formats: tuple[WeightFormat, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader should know: rules assumed, settings that override
    advice: tuple[str, ...] = ()  # when it does not fit: changes that make it fit, smallest first
    schema_version: int = SCHEMA_VERSION

    @property
    def rank(self) -> RankPlan:
        """The rank that decides."""
        return self.ranks[self.worst_rank]

    def __repr__(self) -> str:
        """A few lines for people; the fields are in ``plan_to_dict``."""
        from tonnage.planner.render import summary_lines  # reads plans

        return "\n  ".join(("<Plan", *summary_lines(self))) + ">"

    def _repr_html_(self) -> str:
        """What a notebook shows: the table with memory bars, and nothing outside it."""
        from tonnage.planner.html import plan_fragment  # reads plans

        return plan_fragment(self)
