"""Engine: what the planner asks of the program that is to run a model.

One object an engine, in a file (or a folder) of its own name, found by ``engine_of``. The
answers here are those of an engine without a rule of its own; what differs by version is a table beside the
engine that has versions, a row for each at which something changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tonnage.planner.deployment import Deployment, EngineName
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.engines.runtime.estimate import NOTHING, Coefficients, Estimate, Runtime
from tonnage.planner.engines.version import Version
from tonnage.planner.errors import DeploymentError, EngineRefusal, UnsupportedArchitecture, did_you_mean
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import KV_DTYPE_BYTES
from tonnage.planner.model.host import HostMemory
from tonnage.planner.model.requests import GroupLaw, RequestLaw
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.plans import Failure, Plan, RankPlan, Resolved
from tonnage.planner.quantization.scheme import Quantization

if TYPE_CHECKING:
    from tonnage.planner.engines.log import LogFigures
    from tonnage.planner.engines.runtime.host import Hosted
    from tonnage.planner.model.tensor import HeaderTensor


class Engine(ABC):
    """Class attributes are what an engine is; methods answer for one deployment."""

    name: str  # as --engine spells it
    title: str  # as its authors do
    newest: Version = (0, 0, 0)  # whose rules hold when neither a flag nor an installed package says a version
    oldest: Version = (0, 0, 0)  # whose rules are the first known
    distributions: tuple[str, ...] = ()  # names its package is installed under; empty: never looked for

    # defaults of the flags, by device
    batch: ClassVar[Mapping[str, tuple[int, int]]]  # (max_num_seqs, max_num_batched_tokens)
    blocks: ClassVar[Mapping[str, int]]  # tokens of a block
    kv_dtypes: ClassVar[Mapping[str, int]] = KV_DTYPE_BYTES  # --kv-cache-dtype -> bytes

    # what it can do
    divides = True  # a model over several devices
    drafts = False  # speculative decoding with --speculative-model
    fp8_kv_cache = False  # offered where the KV cache is too large
    float32_kv_cache = False  # also for a model in 16 bits
    graphs = False  # CUDA graphs, which --enforce-eager spares
    lora_ranks: tuple[int, ...] = ()  # values of --max-lora-rank; empty: any
    # device -> formats offered where the weights are too large
    smaller: ClassVar[Mapping[str, tuple[str, ...]]] = {"cpu": ("int8", "nf4"), "cuda": ("int8", "nf4")}
    quantizes_to: tuple[str, ...] = ()  # what it makes of 16-bit weights while it loads them

    elsewhere: EngineName | None = None  # for models that it does not serve, where nobody asked for an engine

    # how it keeps a model
    as_transformers = False  # keys and values as transformers' own modules make them
    pads_vocabulary = False  # of each rank, to whole rows of its padding
    towers_everywhere = False  # of pictures and sound, on every pipeline stage
    keeps_gguf = False  # a GGUF file's tensors in the types it stores them in
    tiles_linear = False  # linear weights may be repacked into padded tiles
    null_block = False  # block 0 of the pool holds nothing
    sized_by_context = False  # the pool is the context that was asked for, whatever memory there is
    # device -> format -> the kernel that repacks its weights (Kind.loaded and Kind.warmed)
    kernels: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    shows_version = True  # beside the name
    logs = False  # says in its start-up log what it holds
    # figures of a whole log, alternatives with a bar between -> how a log comes to have one
    log_figures: ClassVar[Mapping[str, str]] = {}

    # -- flags: completed by tonnage.planner.planning.deployment, or refused by name

    def default_batch(self, flags: Deployment, memory: int, version: Version) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens) on a device of ``memory`` bytes, where prompts are cut."""
        return self.batch[flags.device]

    def cuts_prompts(
        self, flags: Deployment, version: Version, architecture: Architecture, max_model_len: int
    ) -> bool:
        """Whether a prompt may be computed in several steps (chunked prefill)."""
        return True

    def check_length(self, asked: int, architecture: Architecture) -> None:
        """Raise DeploymentError for a --max-model-len above the model's own."""
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
        """What a length that passed ``check_length`` means nevertheless."""
        return ()

    def settle_step(
        self, flags: Deployment, architecture: Architecture, max_model_len: int, tokens: int
    ) -> tuple[Deployment, int]:
        """Flags and tokens of a step for a model whose texts are taken whole. Raises DeploymentError."""
        if architecture.kind == "encoder":
            from tonnage.planner.engines.encoder import whole_texts

            return whole_texts(flags, max_model_len, tokens)
        return flags, tokens

    def default_utilization(self, version: Version) -> float:
        """--gpu-memory-utilization."""
        return 0.9

    def memory_limit(self, flags: Deployment, memory: int, share: float) -> int:
        """Bytes the plan may take: the whole device when the pool's size is given (as in vLLM), else
        device memory x gpu_memory_utilization."""
        return memory if flags.kv_cache_memory_bytes is not None else int(memory * share)

    def static_share(
        self, flags: Deployment, version: Version, memory: int, tokens: int, architecture: Architecture
    ) -> float | None:
        """--mem-fraction-static on a device of ``memory`` bytes, with steps of ``tokens``; None where there is
        no such thing."""
        return None

    def caches_prefixes(self, architecture: Architecture, version: Version) -> bool:
        """Whether prefix caching is on by default."""
        return True

    def draft_note(self, method: str) -> str:
        """How it is told to take a draft of ``method``, in vLLM's name."""
        return f'{self.title} takes this draft with "method": "{method}"'

    def draft_limits(self, version: Version) -> bool:
        """Whether no sequence may be longer than the draft model's own length."""
        return False

    def block_size(self, asked: int | None, flags: Deployment, architecture: Architecture) -> int:
        """Tokens of a block. Raises DeploymentError for one that the engine does not have."""
        return asked or self.blocks[flags.device]

    def choose_dtype(self, flags: Deployment, architecture: Architecture, auto: str) -> str:
        """What the model is loaded in; ``auto``: the checkpoint's own. Raises DeploymentError."""
        return auto if flags.dtype == "auto" else flags.dtype

    def choose_kv_dtype(
        self, flags: Deployment, dtype: str, architecture: Architecture, version: Version, stored: str | None
    ) -> str:
        """What keys and values are stored in, of a model in ``dtype``. ``stored``: what the checkpoint asks for
        (``quantization.read.stored_kv_dtype``). Raises DeploymentError."""
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

    # -- bytes of one rank, whose share of the model ``architecture`` is

    def tensors(self, architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
        """What is really held, where it differs from transformers' modules."""
        return architecture.tensors

    def stored_tensors(self, tensors: tuple[HeaderTensor, ...], flags: Deployment) -> tuple[HeaderTensor, ...]:
        """``tensors`` of a file, where they are kept as it has them (``keeps_gguf``)."""
        return tensors

    def whole_towers(self, architecture: Architecture, flags: Deployment) -> bool:
        """Whether every tensor-parallel rank holds the towers whole."""
        return False

    def kernel_padding(self, architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
        """Bytes that kernels add to the weights after the load: padding, copies in another type."""
        return 0

    def kernel_class(self, gpu: str) -> str | None:
        """A GPU whose kernels pad as those of ``gpu`` of the catalogue; None: none is known."""
        return None

    def allocator_rounding(
        self, architecture: Architecture, quantization: Quantization, flags: Deployment
    ) -> int:
        """Bytes beyond the weights' own that count as theirs."""
        return 0

    def runtime_terms(self, architecture: Architecture, chosen: Resolved) -> Runtime:
        """Framework, activations of a step and CUDA graphs."""
        if chosen.flags.device == "cpu":
            return Runtime(
                self.cpu_framework(architecture, chosen), self.cpu_activation(architecture, chosen), NOTHING
            )
        return self.gpu_terms(architecture, chosen)

    def gpu_terms(
        self, architecture: Architecture, chosen: Resolved, fitted: Coefficients | None = None
    ) -> Runtime:
        """``runtime_terms`` on a GPU. ``fitted``: other coefficients than the shipped ones (scores with a
        source left out)."""
        from tonnage.planner.engines.runtime import gpu

        fitted = fitted or gpu.coefficients()
        activation = self.gpu_activation(architecture, chosen)
        if activation is None:
            activation = gpu.activation(architecture, chosen, fitted)
        return gpu.terms(architecture, chosen, fitted, activation)

    def cpu_framework(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """What the processes hold on a CPU before weights and pool: the hf engine's, where none is measured."""
        from tonnage.planner.engines.runtime import hf

        return hf.framework_bytes(architecture.vocab_size)

    def cpu_activation(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """Activations of a step on a CPU: the hf engine's, where no other's are known."""
        from tonnage.planner.engines.runtime import hf

        return hf.activation_bytes(architecture, chosen)

    def gpu_activation(self, architecture: Architecture, chosen: Resolved) -> Estimate | None:
        """Activations of a step on a GPU; None: the widest layer's."""
        return None

    # -- the pool

    def build_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """The pool of one rank. Raises UnsupportedArchitecture."""
        if architecture.kind == "encoder":
            from tonnage.planner.engines import encoder

            self.check_encoder(architecture)
            return encoder.build_pool(architecture, chosen.flags, chosen.block_size)
        return self.decoder_pool(architecture, chosen)

    def check_encoder(self, architecture: Architecture) -> None:
        """Raise UnsupportedArchitecture for an encoder that the engine (or this planner) does not have."""
        raise UnsupportedArchitecture(
            f"{self.name} is not planned with an encoder", field="model_type", hint="--engine vllm"
        )

    @abstractmethod
    def decoder_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """``build_pool`` of a model that generates."""

    def settle_pool(
        self, architecture: Architecture, chosen: Resolved, pool: PoolSpec, weights: int
    ) -> PoolSpec:
        """``pool`` beside so many bytes of weights on a rank."""
        return pool

    def most_running(self, chosen: Resolved, pool: PoolSpec, held: PoolCapacity) -> int:
        """Most sequences that run at once, once the pool has its size."""
        return chosen.max_num_seqs

    def num_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Blocks of the pool: as many of ``size`` bytes as the bytes given hold, else what ``fixed``, the bytes
        of everything beside it (``weights`` among them), leaves."""
        if not pool.demands:
            return 1  # an encoder: the null block alone
        given = chosen.flags.kv_cache_memory_bytes
        return self.free_blocks(chosen, pool, size, fixed, weights) if given is None else given // size

    def free_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """``num_blocks`` where the pool's bytes are not given."""
        return max(0, chosen.limit - fixed) // size

    def block_bounds(
        self, chosen: Resolved, pool: PoolSpec, size: int, fixed: tuple[int, int], weights: tuple[int, int],
        framework: int,
    ) -> tuple[int, int]:  # fmt: skip
        """Fewest and most blocks where ``fixed`` and ``weights`` are bounds, equal where files or flags decide.
        ``framework``: the most it may take."""
        low = self.num_blocks(chosen, pool, size, fixed[1], weights[1])
        return low, self.num_blocks(chosen, pool, size, fixed[0], weights[0])

    def capacity(self, pool: PoolSpec, chosen: Resolved, num_blocks: int) -> PoolCapacity:
        """What ``num_blocks`` hold, counted as the engine prints it."""
        if not pool.demands:
            from tonnage.planner.engines import encoder

            return encoder.capacity(chosen.max_num_seqs)
        usable = max(0, num_blocks - 1) if self.null_block else num_blocks
        per_sequence = pool.sequence_blocks(chosen.max_model_len)
        tokens = usable * chosen.max_model_len // per_sequence
        return PoolCapacity(num_blocks, usable, per_sequence, tokens, usable / per_sequence)

    def request_law(self, architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
        """What a request of given lengths takes of the pool. Raises UnsupportedArchitecture where it is not
        known."""
        if not pool.demands:
            raise UnsupportedArchitecture("an encoder keeps nothing between steps", field="model_type")
        groups = tuple(GroupLaw("all", demand.block_size) for demand in pool.demands)
        hits = pool.layout.block_size if chosen.flags.enable_prefix_caching else None
        return RequestLaw(
            groups, pool.layout.bytes_per_block, chosen.max_num_batched_tokens, 1, hits, f"{self.title}'s pool"
        )

    def shown_flags(self, flags: Deployment, pool: PoolSpec) -> Deployment:
        """The flags of the plan, once the pool is known."""
        return flags

    # -- the machine's memory, beside its GPUs

    def host_memory(self, hosted: Hosted) -> HostMemory:
        """What all processes of one replica on GPUs hold of the host's memory."""
        return HostMemory(unknown=f"what {self.title} holds beside its GPUs was not measured or read")

    # -- versions

    def changes(self, since: Version, until: Version) -> tuple[tuple[Version, tuple[str, ...]], ...]:
        """Releases after ``since`` up to ``until`` at which something planned changed, with what in words."""
        return ()

    # -- starts that fail

    def sentence(self, cause: str, version: Version, facts: Mapping[str, Any]) -> str | None:
        """What it says when ``cause`` of an EngineRefusal stops it; None: nothing known here."""
        return None

    def foresee(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, pool: PoolSpec, held: PoolCapacity
    ) -> Failure | None:
        """What stops the start of a plan, beside what does not fit, or in which words it does."""
        return None

    def start_notes(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, beside: int
    ) -> tuple[str, ...]:
        """What may stop a start that fits, or what its command cannot say. ``beside``: bytes it takes outside
        what the plan may take."""
        return ()

    # -- words

    def shown_name(self, flags: Deployment) -> str:
        """What a plan calls it."""
        known = self.shows_version and flags.engine_version not in (None, "none")
        return f"{self.name} {flags.engine_version}" if known else self.name

    def serve_lines(self, plan: Plan) -> tuple[str, ...]:
        """Commands that serve ``plan``."""
        return ()

    def own_flags(self, flags: Deployment) -> list[str]:
        """Options of its own command that are not at their defaults, beside devices, sizes and dtypes."""
        return []

    def serve_options(self, flags: Deployment) -> list[str]:
        """Options of its own command for which a compose file of its own has no variable."""
        return []

    def environment_notes(self, flags: Deployment) -> tuple[str, ...]:
        """What is set on this machine and would silently win over the plan."""
        return ()

    def read_log_line(self, line: str, out: LogFigures) -> None:
        """Add what one line of its start-up log says. ``out``: of the rank that printed it."""
        return

    def log_rank(self, line: str) -> tuple[str, str]:
        """(rank, process) named in front of a line of its log; "" for what is not said."""
        return "", ""

    def settle_log(self, out: LogFigures) -> None:
        """Add the figures of a rank that follow from its others, once its log is read."""
        return

    def log_says_ready(self, line: str) -> bool:
        """Whether a line of its log says that it serves."""
        return False

    def logged_pool(self, chosen: Resolved, rank: RankPlan) -> int:
        """Bytes that its log gives as the pool of ``rank``."""
        return rank.kv_pool_bytes

    def unlike_logged(self, flags: Deployment, kind: str, quantization: str | None) -> str | None:
        """Why weights planned with ``flags`` from a source of ``kind`` are not those of a log of this engine,
        started with ``quantization``."""
        return None
