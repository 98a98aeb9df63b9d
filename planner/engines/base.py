"""``Engine``: the interface between the planner and an inference engine.

Each engine has one object, in a file or folder named after it; ``engine_of`` returns it. The methods here are
the
defaults for an engine without rules of its own. Differences between versions are a table in the engine's own
file,
with one row for each version that changed something.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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
from tonnage.planner.plans import Failure, Plan, RankPlan, Resolved
from tonnage.planner.quantization.scheme import Quantization


class Engine(ABC):
    """An inference engine as the planner sees it.

    Class attributes describe the engine; methods answer for one deployment.
    """

    name: str  # value of --engine
    title: str  # the project's own spelling
    newest: Version = (0, 0, 0)  # version assumed when neither a flag nor an installed package gives one
    oldest: Version = (0, 0, 0)  # first version with known rules
    distributions: tuple[str, ...] = ()  # Python packages that contain it, to look up the installed version

    # defaults of the flags, by device
    batch: ClassVar[Mapping[str, tuple[int, int]]]  # (max_num_seqs, max_num_batched_tokens)
    blocks: ClassVar[Mapping[str, int]]  # tokens of a block
    kv_dtypes: ClassVar[Mapping[str, int]] = KV_DTYPE_BYTES  # --kv-cache-dtype -> bytes

    # supported features
    divides = True  # splits a model over several devices
    drafts = False  # speculative decoding with --speculative-model
    fp8_kv_cache = False  # suggest an fp8 KV cache if the KV cache is too large
    float32_kv_cache = False  # a float32 KV cache for a 16-bit model
    graphs = False  # captures CUDA graphs unless --enforce-eager is set
    lora_ranks: tuple[int, ...] = ()  # values of --max-lora-rank; empty: any
    # device -> formats to suggest if the weights are too large
    smaller: ClassVar[Mapping[str, tuple[str, ...]]] = {"cpu": ("int8", "nf4"), "cuda": ("int8", "nf4")}
    quantizes_to: tuple[str, ...] = ()  # formats that it can quantize 16-bit weights to while loading

    fallback: EngineName | None = None  # engine for models that this one cannot serve, if --engine is not set

    # memory layout of a loaded model
    as_transformers = False  # caches keys and values in the shapes of transformers' modules
    pads_vocabulary = False  # pads the vocabulary of each rank to a multiple of 64 rows
    towers_everywhere = False  # loads vision and audio towers on every pipeline stage
    keeps_gguf = False  # keeps tensors of a GGUF file in their stored types
    tiles_linear = False  # linear weights may be repacked into padded tiles
    null_block = False  # block 0 of the pool is reserved and holds no tokens
    sized_by_context = False  # the pool is sized by the requested context instead of by the free memory
    # device -> format -> the kernel that repacks its weights (Kind.loaded and Kind.warmed)
    kernels: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    shows_version = True  # a plan shows the version beside the name
    logs = False  # the start-up log reports memory figures
    # figures of a complete log, alternatives separated by a bar -> the setting that makes the engine log it
    log_figures: ClassVar[Mapping[str, str]] = {}

    # -- flags: tonnage.planner.planning.deployment fills in defaults or rejects a flag by name

    def default_batch(self, flags: Deployment, memory: int, version: Version) -> tuple[int, int]:
        """Return the default (max_num_seqs, max_num_batched_tokens).

        ``memory`` is the device's size in bytes. The values hold for an engine that chunks prompts.
        """
        return self.batch[flags.device]

    def chunks_prompts(
        self, flags: Deployment, version: Version, architecture: Architecture, max_model_len: int
    ) -> bool:
        """Return whether a prompt may be computed in several steps (chunked prefill)."""
        return True

    def check_length(self, asked: int, architecture: Architecture) -> None:
        """Raise DeploymentError for a --max-model-len above the model's own maximum."""
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
        """Return notes about a valid length, such as RoPE scaling that starts below it."""
        return ()

    def adjust_step(
        self, flags: Deployment, architecture: Architecture, max_model_len: int, tokens: int
    ) -> tuple[Deployment, int]:
        """Return the flags and the tokens per step, adjusted for encoders.

        An encoder computes a text in one step, so a step must hold ``max_model_len`` tokens.

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
        sets the
        pool's size (as in vLLM).
        """
        return memory if flags.kv_cache_memory_bytes is not None else int(memory * share)

    def static_share(
        self, flags: Deployment, version: Version, memory: int, tokens: int, architecture: Architecture
    ) -> float | None:
        """Return --mem-fraction-static for a device of ``memory`` bytes and steps of ``tokens`` tokens.

        Returns None for an engine without this flag.
        """
        return None

    def caches_prefixes(self, architecture: Architecture, version: Version) -> bool:
        """Return whether prefix caching is on by default."""
        return True

    def draft_note(self, method: str) -> str:
        """Return a note on the engine's option for a draft of ``method`` (vLLM's method name)."""
        return f'{self.title} takes this draft with "method": "{method}"'

    def draft_limits(self, version: Version) -> bool:
        """Return whether the draft model's maximum length also limits every sequence."""
        return False

    def block_size(self, asked: int | None, flags: Deployment, architecture: Architecture) -> int:
        """Return the tokens per block.

        Raises:
            DeploymentError: the engine does not support the requested block size.
        """
        return asked or self.blocks[flags.device]

    def choose_dtype(self, flags: Deployment, architecture: Architecture, auto: str) -> str:
        """Return the dtype that the model is loaded in; ``auto`` is the checkpoint's own.

        Raises:
            DeploymentError: the engine cannot load the model in the requested dtype.
        """
        return auto if flags.dtype == "auto" else flags.dtype

    def choose_kv_dtype(
        self, flags: Deployment, dtype: str, architecture: Architecture, version: Version, stored: str | None
    ) -> str:
        """Return the dtype of keys and values in the cache, for a model in ``dtype``.

        ``stored`` is the cache dtype that the checkpoint requests (``quantization.read.stored_kv_dtype``).

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
                f"{self.title} has no float32 KV cache for a 16-bit model", field="--kv-cache-dtype"
            )
        return asked

    # -- bytes of one rank; ``architecture`` is that rank's share of the model

    def tensors(self, architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
        """Return the tensors that the engine holds, where they differ from transformers' modules."""
        return architecture.tensors

    def stored_tensors(self, tensors: tuple[HeaderTensor, ...], flags: Deployment) -> tuple[HeaderTensor, ...]:
        """Return the tensors of a file that stay in their stored type (``keeps_gguf``)."""
        return tensors

    def whole_towers(self, architecture: Architecture, flags: Deployment) -> bool:
        """Return whether every tensor-parallel rank holds the vision and audio towers in full."""
        return False

    def kernel_padding(self, architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
        """Return the bytes that kernels add to the weights after loading (padding, copies in another type)."""
        return 0

    def kernel_class(self, gpu: str) -> str | None:
        """Return a catalogue GPU with the same kernel padding as ``gpu``, or None if none is known."""
        return None

    def allocator_rounding(
        self, architecture: Architecture, quantization: Quantization, flags: Deployment
    ) -> int:
        """Return the bytes that allocator rounding adds to the weights."""
        return 0

    def runtime_terms(self, architecture: Architecture, chosen: Resolved) -> Runtime:
        """Return the estimates of framework memory, activations of a step and CUDA graphs on one rank."""
        if chosen.flags.device == "cpu":
            return Runtime(
                self.cpu_framework(architecture, chosen), self.cpu_activation(architecture, chosen), NOTHING
            )
        return self.gpu_terms(architecture, chosen)

    def gpu_terms(
        self, architecture: Architecture, chosen: Resolved, fitted: Coefficients | None = None
    ) -> Runtime:
        """Return ``runtime_terms`` for a GPU.

        ``fitted`` replaces the shipped coefficients, for scores that leave out one source of measurements.
        """
        fitted = fitted or gpu.coefficients()
        activation = self.gpu_activation(architecture, chosen)
        if activation is None:
            activation = gpu.activation(architecture, chosen, fitted)
        return gpu.terms(architecture, chosen, fitted, activation)

    def cpu_framework(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """Estimate the processes' memory on a CPU before weights and pool are loaded.

        The default is the measurement of the hf engine.
        """
        return hf.framework_bytes(architecture.vocab_size)

    def cpu_activation(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """Estimate the activations of one step on a CPU; the default is the hf engine's formula."""
        return hf.activation_bytes(architecture, chosen)

    def gpu_activation(self, architecture: Architecture, chosen: Resolved) -> Estimate | None:
        """Estimate the activations of one step on a GPU, or return None to use the widest layer."""
        return None

    # -- the pool

    def build_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """Return the block pool of one rank.

        Raises:
            UnsupportedArchitecture: the engine, or this planner, has no pool for the model.
        """
        if architecture.kind == "encoder":
            self.check_encoder(architecture)
            return encoder.build_pool(architecture, chosen.flags, chosen.block_size)
        return self.decoder_pool(architecture, chosen)

    def check_encoder(self, architecture: Architecture) -> None:
        """Raise UnsupportedArchitecture for an encoder that the engine or this planner does not support."""
        raise UnsupportedArchitecture(
            f"{self.name} is not planned with an encoder", field="model_type", hint="--engine vllm"
        )

    @abstractmethod
    def decoder_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """Return the block pool of one rank for a model that generates tokens."""

    def adjust_pool(
        self, architecture: Architecture, chosen: Resolved, pool: PoolSpec, weights: int
    ) -> PoolSpec:
        """Return ``pool`` adjusted to ``weights`` bytes of weights on the same rank."""
        return pool

    def most_running(self, chosen: Resolved, pool: PoolSpec, held: PoolCapacity) -> int:
        """Return the maximum number of running sequences for a pool of known size."""
        return chosen.max_num_seqs

    def num_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of blocks of ``size`` bytes in the pool.

        The pool has --kv-cache-memory-bytes, or else the memory that ``fixed`` leaves. ``fixed`` is the bytes
        of
        everything except the pool, ``weights`` included.
        """
        if not pool.demands:
            return 1  # an encoder has only the null block
        given = chosen.flags.kv_cache_memory_bytes
        return self.free_blocks(chosen, pool, size, fixed, weights) if given is None else given // size

    def free_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of blocks that fit beside ``fixed`` bytes when the pool's size is not given."""
        return max(0, chosen.limit - fixed) // size

    def block_bounds(
        self, chosen: Resolved, pool: PoolSpec, size: int, fixed: tuple[int, int], weights: tuple[int, int],
        framework: int,
    ) -> tuple[int, int]:  # fmt: skip
        """Return the fewest and most blocks of the pool.

        ``fixed`` and ``weights`` are (low, high) bounds in bytes; low equals high where files or flags fix the
        value.
        ``framework`` is the upper bound of the framework's bytes.
        """
        low = self.num_blocks(chosen, pool, size, fixed[1], weights[1])
        return low, self.num_blocks(chosen, pool, size, fixed[0], weights[0])

    def capacity(self, pool: PoolSpec, chosen: Resolved, num_blocks: int) -> PoolCapacity:
        """Return the capacity of a pool of ``num_blocks`` blocks, counted as the engine prints it."""
        if not pool.demands:
            return encoder.capacity(chosen.max_num_seqs)
        usable = max(0, num_blocks - 1) if self.null_block else num_blocks
        per_sequence = pool.sequence_blocks(chosen.max_model_len)
        tokens = usable * chosen.max_model_len // per_sequence
        return PoolCapacity(num_blocks, usable, per_sequence, tokens, usable / per_sequence)

    def request_law(self, architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
        """Return the rule for the blocks that a request takes, given its lengths.

        Raises:
            UnsupportedArchitecture: the rule is not known for this model.
        """
        if not pool.demands:
            raise UnsupportedArchitecture("an encoder keeps nothing between steps", field="model_type")
        groups = tuple(GroupLaw("all", demand.block_size) for demand in pool.demands)
        hits = pool.layout.block_size if chosen.flags.enable_prefix_caching else None
        return RequestLaw(
            groups, pool.layout.bytes_per_block, chosen.max_num_batched_tokens, 1, hits, f"{self.title}'s pool"
        )

    def shown_flags(self, flags: Deployment, pool: PoolSpec) -> Deployment:
        """Return the flags that the plan shows, after the pool was sized."""
        return flags

    # -- host memory

    def host_memory(self, hosted: HostInputs) -> HostMemory:
        """Return the host memory of all processes of one replica on GPUs."""
        return HostMemory(unknown=f"what {self.title} holds beside its GPUs was not measured or read")

    # -- versions

    def changes(self, since: Version, until: Version) -> tuple[tuple[Version, tuple[str, ...]], ...]:
        """Return the releases after ``since`` up to ``until`` that changed a planned figure, described."""
        return ()

    # -- start-up failures

    def error_message(self, cause: str, version: Version, facts: Mapping[str, Any]) -> str | None:
        """Return the engine's own error message for ``cause`` of an EngineRefusal, or None if it is unknown."""
        return None

    def predict_failure(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, pool: PoolSpec, held: PoolCapacity
    ) -> Failure | None:
        """Return a start-up failure that the plan predicts, other than lack of memory, or None."""
        return None

    def start_notes(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, beside: int
    ) -> tuple[str, ...]:
        """Return notes on risks of a start that fits, and on settings without an option in the command.

        ``beside`` is the bytes that the engine takes outside the plan's limit.
        """
        return ()

    # -- texts: names, commands, logs

    def shown_name(self, flags: Deployment) -> str:
        """Return the engine's name as a plan shows it, with its version if one is known."""
        known = self.shows_version and flags.engine_version not in (None, "none")
        return f"{self.name} {flags.engine_version}" if known else self.name

    def serve_lines(self, plan: Plan) -> tuple[str, ...]:
        """Return the shell commands that serve ``plan``."""
        return ()

    def own_flags(self, flags: Deployment) -> list[str]:
        """Return the command's options that differ from their defaults, except devices, sizes and dtypes."""
        return []

    def serve_options(self, flags: Deployment) -> list[str]:
        """Return options of the engine's command that its compose file has no variable for."""
        return []

    def environment_notes(self, flags: Deployment) -> tuple[str, ...]:
        """Return notes on environment variables of this machine that would override the plan."""
        return ()

    def read_log_line(self, line: str, out: LogFigures) -> None:
        """Add the figures of one start-up log line to ``out``, the figures of the rank that printed it."""
        return

    def log_rank(self, line: str) -> tuple[str, str]:
        """Return the (rank, process) prefix of a log line, with "" for a missing part."""
        return "", ""

    def finish_log(self, out: LogFigures) -> None:
        """Add figures of a rank that are derived from its others, after the whole log was read."""
        return

    def log_is_ready(self, line: str) -> bool:
        """Return whether a log line reports that the engine is ready to serve."""
        return False

    def logged_pool(self, chosen: Resolved, rank: RankPlan) -> int:
        """Return the bytes that the engine's log reports as the pool of ``rank``."""
        return rank.kv_pool_bytes

    def log_mismatch(self, flags: Deployment, kind: str, quantization: str | None) -> str | None:
        """Return why the planned weights are not the weights of the engine's log, or None if they may be.

        ``kind`` is the kind of the planned model's source; ``quantization`` is the format in the log.
        """
        return None
