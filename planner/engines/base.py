"""``Engine``: the interface between the planner and an inference engine.

Each engine has one object, in a file or folder named after it; ``engine_of`` returns it. The methods here are
the defaults for an engine without rules of its own. Differences between versions are a table in the engine's
own file, with one row for each version that changed something.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from tonnage.planner.deployment import Deployment, EngineName
from tonnage.planner.engines import encoder
from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.engines.runtime import gpu, hf
from tonnage.planner.engines.runtime.estimate import NOTHING, Coefficients, Estimate, Runtime
from tonnage.planner.engines.runtime.host import HostInputs
from tonnage.planner.engines.version import Version
from tonnage.planner.errors import DeploymentError, EngineRefusal, UnsupportedArchitecture, did_you_mean
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import KV_DTYPE_BYTES
from tonnage.planner.model.host import HostMemory
from tonnage.planner.model.requests import GroupLaw, RequestLaw
from tonnage.planner.model.tensor import HeaderTensor, TensorSpec
from tonnage.planner.model.tier import KVTier
from tonnage.planner.plans import Failure, Plan, RankPlan, Resolved
from tonnage.planner.quantization.kv_cache import StoredCache
from tonnage.planner.quantization.scheme import Quantization


class Engine(ABC):
    """An inference engine as the planner sees it.

    Class attributes describe the engine. Methods return what the engine does for one deployment.
    """

    name: str  # the engine's value of --engine
    title: str  # name of the engine as its project spells it
    newest: Version = (0, 0, 0)  # version assumed when neither a flag nor an installed package gives one
    oldest: Version = (0, 0, 0)  # first version whose memory rules the planner knows
    distributions: tuple[str, ...] = ()  # names under which the engine is installed as a Python package

    # `batch` and `blocks` map a device type ("cpu", "cuda") to defaults of the engine's flags.
    batch: ClassVar[Mapping[str, tuple[int, int]]]  # (max_num_seqs, max_num_batched_tokens)
    blocks: ClassVar[Mapping[str, int]]  # default tokens per KV cache block
    kv_dtypes: ClassVar[Collection[str]] = KV_DTYPE_BYTES  # valid values of --kv-cache-dtype besides auto

    # Features that the engine supports.
    divides = True  # whether the engine splits a model over several devices
    drafts = False  # whether the engine supports --speculative-model
    fp8_kv_cache = False  # whether the planner suggests an fp8 KV cache if the cache is too large
    float32_kv_cache = False  # whether the engine supports a float32 KV cache for a 16-bit model
    graphs = False  # whether the engine captures CUDA graphs unless --enforce-eager is set
    lora_ranks: tuple[int, ...] = ()  # valid values of --max-lora-rank; empty if any is valid

    # Device -> quantization formats that the planner suggests if the weights are too large
    smaller: ClassVar[Mapping[str, tuple[str, ...]]] = {"cpu": ("int8", "nf4"), "cuda": ("int8", "nf4")}
    # Formats to which the engine can quantize 16-bit weights while it loads them.
    quantizes_to: tuple[str, ...] = ()
    # whether --quantization accepts the names in quantization.names.WHILE_LOADING, which are vLLM's names of
    # formats made while loading
    names_formats = False

    # Engine that is planned instead for models that this engine cannot serve, if --engine is not set.
    fallback: EngineName | None = None

    # Memory layout of a loaded model.
    as_transformers = False  # whether keys and values are cached in the shapes of transformers' modules
    pads_vocabulary = False  # whether a rank's rows of embedding and output head are padded to 64
    towers_everywhere = False  # whether every pipeline stage loads the vision and audio towers
    keeps_gguf = False  # whether tensors of a GGUF file keep their GGML types in memory
    tiles_linear = False  # whether linear weights may be repacked into padded tiles
    null_block = False  # whether block 0 of the pool is reserved and holds no tokens
    sized_by_context = False  # whether the requested context sets the pool's size, instead of free memory

    # Device -> quantization format -> name of the kernel that repacks the weights. The name is a key of
    # Kind.loaded and Kind.warmed in quantization/linear.py.
    kernels: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    shows_version = True  # whether a plan shows the engine's version beside its name
    logs = False  # whether the start-up log reports memory figures

    # Name of a figure that a complete start-up log contains -> the setting that makes the engine log it. A name
    # such as "a|b" means that the log contains figure a or figure b.
    log_figures: ClassVar[Mapping[str, str]] = {}

    # -- Flags: planning/deployment.py uses these methods to fill in defaults and to reject invalid flags.

    def default_batch(self, flags: Deployment, memory: int, version: Version) -> tuple[int, int]:
        """Return the engine's default values (max_num_seqs, max_num_batched_tokens).

        ``memory`` is the device's memory in bytes. The default of max_num_batched_tokens applies only with
        chunked prefill.
        """
        return self.batch[flags.device]

    def chunks_prompts(
        self, flags: Deployment, version: Version, architecture: Architecture, max_model_len: int
    ) -> bool:
        """Return whether the engine may compute a prompt in several steps (chunked prefill)."""
        return True

    def check_length(self, asked: int, architecture: Architecture) -> None:
        """Raise DeploymentError if --max-model-len (``asked``) exceeds the model's own maximum."""
        own = architecture.max_model_len
        if asked > own:
            raise EngineRefusal(
                f"{asked} is above the model's own {own} ({architecture.position_field})",
                field="--max-model-len",
                hint=f"at most {own}",
                cause="length",
                facts={
                    "asked": asked,
                    "own": own,
                    "field": architecture.position_field,
                    "rope": architecture.rotary is not None,
                },
            )

    def length_notes(self, asked: int, architecture: Architecture) -> tuple[str, ...]:
        """Return notes about a valid --max-model-len (``asked``), such as RoPE scaling that starts below it."""
        return ()

    def adjust_step(
        self, flags: Deployment, architecture: Architecture, max_model_len: int, tokens: int
    ) -> tuple[Deployment, int]:
        """Return the plan's flags and the maximum tokens per step, adjusted for encoder models.

        An encoder computes a whole text in one step, so a step must hold ``max_model_len`` tokens.

        Raises:
            DeploymentError: --max-num-batched-tokens is below ``max_model_len`` for an encoder.
        """
        if architecture.kind == "encoder":
            return encoder.whole_texts(flags, max_model_len, tokens)
        return flags, tokens

    def default_utilization(self, version: Version) -> float:
        """Return the default of --gpu-memory-utilization, a share of the device's memory."""
        return 0.9

    def memory_limit(self, flags: Deployment, memory: int, share: float) -> int:
        """Return the bytes of one device that the plan may use.

        The limit is device memory x gpu_memory_utilization, or the whole device when --kv-cache-memory-bytes
        sets the pool's size (as in vLLM).
        """
        return memory if flags.kv_cache_memory_bytes is not None else int(memory * share)

    def static_share(
        self, flags: Deployment, version: Version, memory: int, tokens: int, architecture: Architecture
    ) -> float | None:
        """Return the effective --mem-fraction-static, or None for an engine without this flag.

        The flag sets SGLang's share of device memory for weights and KV pool. ``memory`` is the device's memory
        in bytes, ``tokens`` the maximum tokens per step.
        """
        return None

    def caches_prefixes(self, architecture: Architecture, version: Version) -> bool:
        """Return whether the engine's ``version`` has prefix caching on by default for this model."""
        return True

    def draft_note(self, method: str) -> str:
        """Return a note on how to configure speculative decoding by ``method`` (vLLM's name) in this engine."""
        return f'{self.title} takes this draft with "method": "{method}"'

    def draft_limits(self, version: Version) -> bool:
        """Return whether the draft model's maximum length also limits the length of every sequence."""
        return False

    def block_size(self, asked: int | None, flags: Deployment, architecture: Architecture) -> int:
        """Return the tokens per KV cache block; ``asked`` is the requested number, or None for the default.

        Raises:
            DeploymentError: the engine does not support the requested block size.
        """
        return asked or self.blocks[flags.device]

    def choose_dtype(self, flags: Deployment, architecture: Architecture, auto: str) -> str:
        """Return the dtype that the model is loaded in; ``auto`` is the dtype of the checkpoint.

        Raises:
            DeploymentError: the engine cannot load the model in the requested dtype.
        """
        return auto if flags.dtype == "auto" else flags.dtype

    def check_version(self, flags: Deployment, version: Version) -> None:
        """Raise DeploymentError for flags that the engine's version lacks, or that contradict each other."""
        return

    def check_quantization(self, name: str, version: Version) -> None:
        """Raise DeploymentError if a version of the engine has no --quantization ``name``."""
        return

    def choose_kv_dtype(
        self, flags: Deployment, dtype: str, architecture: Architecture, version: Version,
        stored: StoredCache | None,
    ) -> str:  # fmt: skip
        """Return the dtype of keys and values in the KV cache, for a model loaded in ``dtype``.

        ``stored`` is the KV cache dtype that the checkpoint's config requests, or None. Most engines ignore it.

        Raises:
            DeploymentError: the engine has no KV cache in the requested dtype.
        """
        asked = flags.kv_cache_dtype
        if asked == "auto":
            return dtype
        if asked not in self.kv_dtypes:
            known = ", ".join(self.kv_dtypes)
            raise DeploymentError(
                f"{asked!r} is not one of auto, {known}", field="--kv-cache-dtype",
                hint=did_you_mean(asked, self.kv_dtypes),
            )  # fmt: skip
        if asked == "float32" and dtype != "float32" and not self.float32_kv_cache:
            raise DeploymentError(
                f"{self.title} has no float32 KV cache for a 16-bit model",
                field="--kv-cache-dtype",
                hint="use auto",
            )
        return asked

    # -- Bytes of one rank. In these methods, ``architecture`` is the rank's share of the model.

    def tensors(self, architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
        """Return the tensors of the engine's modules; by default, they are those of transformers' modules."""
        return architecture.tensors

    def stored_tensors(self, tensors: tuple[HeaderTensor, ...], flags: Deployment) -> tuple[HeaderTensor, ...]:
        """Return the tensors of a GGUF file that the engine keeps in device memory in their GGML types."""
        return tensors

    def whole_towers(self, architecture: Architecture, flags: Deployment) -> bool:
        """Return whether every tensor-parallel rank holds the vision and audio towers in full."""
        return False

    def kernel_padding(self, architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
        """Return the bytes that kernels add to a rank's weights after loading, by padding and by copies."""
        return 0

    def step_buffers(self, architecture: Architecture, chosen: Resolved) -> int:
        """Return the bytes of buffers on one rank whose size depends on the tokens of a step.

        The model's modules allocate these buffers while the weights are loaded.
        """
        return 0

    def most_kernel_padding(
        self, architecture: Architecture, quantization: Quantization, flags: Deployment
    ) -> int:
        """Return the upper bound of the bytes that kernels add to a rank's weights after loading.

        It exceeds the result of `kernel_padding` if the engine may select another kernel while loading.
        """
        return self.kernel_padding(architecture, quantization, flags)

    def kernel_class(self, gpu: str) -> str | None:
        """Return a GPU whose kernels pad weights as on ``gpu``; None if ``gpu`` uses the default kernels."""
        return None

    def allocator_rounding(
        self, architecture: Architecture, quantization: Quantization, flags: Deployment
    ) -> int:
        """Return the bytes that the GPU's memory allocator adds to a rank's weights by rounding up."""
        return 0

    def runtime_terms(self, architecture: Architecture, chosen: Resolved) -> Runtime:
        """Return the estimated memory of one rank besides weights and KV pool.

        It consists of framework memory (such as CUDA's context), activations of one step, and CUDA graphs.
        """
        if chosen.flags.device == "cpu":
            return Runtime(
                self.cpu_framework(architecture, chosen), self.cpu_activation(architecture, chosen), NOTHING
            )
        return self.gpu_terms(architecture, chosen)

    def gpu_terms(
        self, architecture: Architecture, chosen: Resolved, fitted: Coefficients | None = None
    ) -> Runtime:
        """Return the estimated bytes of activations, framework and CUDA graphs of one rank on a GPU.

        ``fitted`` replaces the shipped coefficients of the memory formulas. Cross-validation passes
        coefficients that were fitted without one source of measurements.
        """
        fitted = fitted or gpu.coefficients()
        activation = self.gpu_activation(architecture, chosen)
        if activation is None:
            activation = gpu.activation(architecture, chosen, fitted)
        return gpu.terms(architecture, chosen, fitted, activation)

    def cpu_framework(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """Estimate the memory of the engine's processes on a CPU, without weights and KV pool.

        The default is the measured memory of this project's hf engine.
        """
        return hf.framework_bytes(architecture.vocab_size)

    def cpu_activation(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """Estimate the activations of one step on a CPU; the default is the hf engine's formula."""
        return hf.activation_bytes(architecture, chosen)

    def gpu_activation(self, architecture: Architecture, chosen: Resolved) -> Estimate | None:
        """Estimate the activations of one step on a GPU, or return None without a rule for this engine.

        If the result is None, the caller estimates the activations from the model's widest layer.
        """
        return None

    # -- The pool of KV cache blocks.

    def build_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """Return the pool of KV cache blocks of one rank.

        Raises:
            UnsupportedArchitecture: the engine or this planner does not support the model's KV cache.
        """
        if architecture.kind == "encoder":
            self.check_encoder(architecture)
            return encoder.build_pool(architecture, chosen.flags, chosen.block_size)
        if architecture.is_classifier or architecture.pooled:
            self.check_classifier(architecture)
        return self.decoder_pool(architecture, chosen)

    def check_classifier(self, architecture: Architecture) -> None:
        """Raise UnsupportedArchitecture for a decoder with a classifier that the planner does not support."""
        raise UnsupportedArchitecture(
            f"the planner does not support {architecture.class_name} on {self.name}", field="architectures",
            hint="--engine vllm",
        )  # fmt: skip

    def check_encoder(self, architecture: Architecture) -> None:
        """Raise UnsupportedArchitecture for an encoder model that the engine or planner does not support."""
        raise UnsupportedArchitecture(
            f"the planner does not support encoder models on {self.name}",
            field="model_type",
            hint="--engine vllm",
        )

    @abstractmethod
    def decoder_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """Return the pool of KV cache blocks on one rank, for a model that generates tokens."""

    def adjust_pool(
        self, architecture: Architecture, chosen: Resolved, pool: PoolSpec, weights: int
    ) -> PoolSpec:
        """Return ``pool`` with the parts added whose size depends on the rank's ``weights`` bytes.

        An example is SGLang's slots for recurrent states, in a part of the memory left beside the weights.
        """
        return pool

    def most_running(self, chosen: Resolved, pool: PoolSpec, held: PoolCapacity) -> int:
        """Return the maximum number of running sequences, for a KV cache pool of capacity ``held``."""
        return chosen.max_num_seqs

    def num_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of KV cache blocks of ``size`` bytes in a rank's pool.

        The pool takes --kv-cache-memory-bytes if set, or else the memory left beside ``fixed`` bytes. ``fixed``
        counts everything except the pool, ``weights`` included.
        """
        if not pool.demands:
            return 1  # the pool of an encoder model has only the null block (block 0)
        given = chosen.flags.kv_cache_memory_bytes
        return self.free_blocks(chosen, pool, size, fixed, weights) if given is None else given // size

    def free_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of KV cache blocks of ``size`` bytes that fit into memory beside ``fixed`` bytes.

        This number is the pool's size if no flag sets it. ``fixed`` includes the ``weights`` bytes.
        """
        return max(0, chosen.limit - fixed) // size

    def block_bounds(
        self, chosen: Resolved, pool: PoolSpec, size: int, fixed: tuple[int, int], weights: tuple[int, int],
        framework: int,
    ) -> tuple[int, int]:  # fmt: skip
        """Return the lower and upper bound of the number of blocks in the KV cache pool.

        ``fixed`` and ``weights`` are (low, high) bounds in bytes. They are equal where files or flags determine
        the value. ``framework`` is the upper bound of the framework's bytes.
        """
        low = self.num_blocks(chosen, pool, size, fixed[1], weights[1])
        return low, self.num_blocks(chosen, pool, size, fixed[0], weights[0])

    def capacity(self, pool: PoolSpec, chosen: Resolved, num_blocks: int) -> PoolCapacity:
        """Return the capacity of a KV cache pool of ``num_blocks`` blocks.

        Tokens and concurrency are counted as in the engine's start-up log.
        """
        if not pool.demands:
            return encoder.capacity(chosen.max_num_seqs)
        usable = max(0, num_blocks - 1) if self.null_block else num_blocks
        per_sequence = pool.sequence_blocks(chosen.max_model_len)
        tokens = usable * chosen.max_model_len // per_sequence
        return PoolCapacity(num_blocks, usable, per_sequence, tokens, usable / per_sequence)

    def request_law(self, architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
        """Return the rule for the number of KV cache blocks that a request takes, by prompt and output lengths.

        Raises:
            UnsupportedArchitecture: the rule is not known for this model.
        """
        if not pool.demands:
            raise UnsupportedArchitecture(
                "an encoder keeps no KV cache between steps, so no request takes KV cache blocks",
                field="model_type",
            )
        groups = tuple(GroupLaw("all", demand.block_size) for demand in pool.demands)
        hits = pool.layout.block_size if chosen.flags.enable_prefix_caching else None
        return RequestLaw(
            groups, pool.layout.bytes_per_block, chosen.max_num_batched_tokens, 1, hits, f"{self.title}'s pool"
        )

    def shown_flags(self, flags: Deployment, pool: PoolSpec) -> Deployment:
        """Return ``flags`` as the plan shows them, with values such as the block size taken from ``pool``."""
        return flags

    # -- Host memory.

    def tier_bytes(self, chosen: Resolved, pool: PoolSpec) -> int:
        """Return the bytes of a rank's KV offloading tier that count as device memory.

        They are 0 on a GPU. On a CPU, the tier in host memory and the KV pool share one memory.

        Raises:
            DeploymentError: the tier cannot be used with the model or with another flag.
        """
        return 0

    def index_bytes(self, chosen: Resolved, pool: PoolSpec) -> int:
        """Return the bytes of the disk KV tier's in-memory index that count as device memory; 0 on a GPU.

        On a CPU, the index and the KV pool share one memory.
        """
        return 0

    def tiers(self, hosted: HostInputs) -> tuple[KVTier, ...]:
        """Return one replica's KV offloading tiers, which hold blocks in host memory or on disk.

        Raises:
            DeploymentError: a tier's flag is not understood.
        """
        return ()

    def host_memory(self, hosted: HostInputs) -> HostMemory:
        """Return the host memory of all engine processes of one replica on GPUs."""
        return HostMemory(unknown=f"what {self.title} holds beside its GPUs was not measured or read")

    # -- Differences between versions of the engine.

    def changes(self, since: Version, until: Version) -> tuple[tuple[Version, tuple[str, ...]], ...]:
        """Return (version, descriptions of changes) of each engine release that changed a figure of a plan.

        The releases are those after ``since`` up to and including ``until``.
        """
        return ()

    # -- Failures at the engine's start-up.

    def error_message(self, cause: str, version: Version, facts: Mapping[str, Any]) -> str | None:
        """Return this engine version's own error message for the EngineRefusal ``cause``, or None if unknown.

        ``facts`` are the values that the message quotes.
        """
        return None

    def predict_failure(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, pool: PoolSpec, held: PoolCapacity
    ) -> Failure | None:
        """Return a start-up failure that the plan predicts, other than lack of memory, or None without one."""
        return None

    def start_notes(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, beside: int
    ) -> tuple[str, ...]:
        """Return notes on risks of a start that fits into memory, and on settings without a serve option.

        ``beside`` is the bytes that the engine takes outside the plan's memory limit.
        """
        return ()

    # -- Texts: the engine's name, its serve command and its start-up log.

    def shown_name(self, flags: Deployment) -> str:
        """Return the engine's name as a plan shows it, with its version if one is known."""
        known = self.shows_version and flags.engine_version not in (None, "none")
        return f"{self.name} {flags.engine_version}" if known else self.name

    def serve_lines(self, plan: Plan) -> tuple[str, ...]:
        """Return the shell commands that serve ``plan``."""
        return ()

    def machines_note(self, machines: int) -> str:
        """Return a text on how to start one replica over several machines with the engine's command, or ""."""
        return ""

    def own_flags(self, flags: Deployment) -> list[str]:
        """Return the engine's non-default command options, except devices, sizes and dtypes."""
        return []

    def serve_options(self, flags: Deployment) -> list[str]:
        """Return the options of the serve command that the engine's Docker Compose file has no variable for."""
        return []

    def environment_notes(self, flags: Deployment) -> tuple[str, ...]:
        """Return notes on environment variables of this machine that would override the plan."""
        return ()

    def read_log_line(self, line: str, out: LogFigures) -> None:
        """Add the memory figures of one start-up log line to ``out``, which is for the line's rank."""
        return

    def log_rank(self, line: str) -> tuple[str, str]:
        """Return the (rank, process) prefix of a start-up log line, with "" for a missing part."""
        return "", ""

    def finish_log(self, out: LogFigures) -> None:
        """Derive further memory figures of a rank in ``out``, after its whole start-up log was read."""
        return

    def log_is_ready(self, line: str) -> bool:
        """Return whether a line of the engine's log reports that the engine is ready to serve."""
        return False

    def logged_pool(self, chosen: Resolved, rank: RankPlan) -> int:
        """Return the bytes that the engine's log reports as the KV pool of ``rank``."""
        return rank.kv_pool_bytes

    def log_mismatch(self, flags: Deployment, kind: str, quantization: str | None) -> str | None:
        """Return why the planned weights must differ from the weights in the log, or None if they can be equal.

        ``kind`` is the kind of the planned model's source, such as gguf. ``quantization`` is the format in the
        log.
        """
        return None
