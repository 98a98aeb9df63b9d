# ruff: noqa: E501 (vLLM's own messages are long)
"""Start-up failures of vLLM that a plan predicts: the cause of each, and the planned version's error message.

The messages are from these files of vLLM 0.8.5 to 0.33.0, which check the following:

- config/model.py: the maximum length, the number of heads and the dtype.
- config/vllm.py: the dtype of the KV cache.
- config/parallel.py and v1/worker/gpu_worker.py: the number of GPUs.
- v1/worker/utils.py: the GPU memory in use by other programs.
- v1/core/kv_cache_utils.py, from 0.33 on kv_cache_planning.py: the size of the KV cache pool.
- config/compilation.py: the number of recurrent states.
- distributed/utils.py: sizes that the number of ranks must divide.
- model_executor/models/registry.py: model classes.

``error_message`` returns vLLM's message for an error. ``predict_failure`` finds the first failure of a complete
plan, in the order in which vLLM checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.engines.version import Version, parse_version
from tonnage.planner.engines.vllm.flashinfer import drops_full_graphs
from tonnage.planner.engines.vllm.kv_formats import sparse_latent
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Failure, RankPlan, Resolved
from tonnage.planner.units import GiB, gib

_V1 = (0, 8, 0)
_DOCS = " See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
_OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory."


def error_message(cause: str, version: Version, facts: Mapping[str, Any]) -> str | None:
    """Return the error message of vLLM ``version`` for the start-up failure ``cause``, or None without one."""
    if cause in _TEXTS:
        return _TEXTS[cause].format_map(facts)
    found = _MESSAGES.get(cause)
    return None if found is None else found(version, facts)


# Cause of a failure -> vLLM's message, if it is the same in all versions, with the names of the facts in braces.
_TEXTS = {
    "heads": "ValueError: Total number of attention heads ({heads}) must be divisible by tensor parallel size ({ranks}).",
    "divided": "AssertionError: {size} is not divisible by {ranks}",
    "merged": "AssertionError without words (assert all(output_size % self.tp_size == 0 for output_size in output_sizes))",
    "mm_input": "ValueError: Chunked MM input disabled but max_tokens_per_mm_item ({tokens}) is larger than "
    "max_num_batched_tokens ({step}). Please increase max_num_batched_tokens.",
    "batch": "ValueError: max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs}).",
}


def _kv_heads(version: Version, facts: Mapping[str, Any]) -> str:
    heads, ranks = "self.total_num_kv_heads", "tp_size"
    if facts["heads"] < facts["ranks"]:
        heads, ranks = ranks, heads
    return f"AssertionError without words (assert {heads} % {ranks} == 0)"


def _length(version: Version, facts: Mapping[str, Any]) -> str:
    own = facts["own"]
    # vLLM multiplies the length by a RoPE factor, 1.0 for most models, so the length in the message is a float.
    if version >= (0, 12, 0) and facts["rope"]:
        own = float(own)
    text = (
        f"ValueError: User-specified max_model_len ({facts['asked']}) is greater than the derived max_model_len "
        f"({facts['field']}={own} or model_max_length=None in model's config.json)."
    )
    if version < (0, 10, 0):
        text += " This may lead to incorrect model outputs or CUDA errors."
    text += " To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    if version < (0, 10, 0):
        return text
    return (
        f"{text}. VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution. If the model uses relative "
        "position encoding (RoPE), positions exceeding derived_max_model_len lead to nan. If the model uses "
        "absolute position encoding, positions exceeding derived_max_model_len will cause a CUDA array "
        "out-of-bounds error."
    )


def _float16(version: Version, facts: Mapping[str, Any]) -> str | None:
    if version < (0, 9, 0):
        return None
    return (
        f"ValueError: The model type {facts['model_type']!r} does not support float16. Reason: Numerical "
        "instability. Please use bfloat16 or float32 instead."
    )


def _bfloat16(version: Version, facts: Mapping[str, Any]) -> str:
    major, minor = facts["capability"]
    return (
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your "
        f"{facts['gpu']} GPU has compute capability {major}.{minor}. You can use float16 instead by explicitly "
        "setting the `dtype` flag in CLI, for example: --dtype=half."
    )


def _kv_dtype(version: Version, facts: Mapping[str, Any]) -> str:
    dtype = facts["dtype"]
    allowed = f"`auto` or `{dtype}`" if dtype in ("float16", "bfloat16") else "`auto`"
    return (
        f'ValueError: kv_cache_dtype="{facts["asked"]}" is incompatible with dtype="{dtype}". Please set '
        f"`--kv-cache-dtype` to {allowed}."
    )


def _cpu_latents(version: Version, facts: Mapping[str, Any]) -> str:
    if version < (0, 28, 0):
        return "NotImplementedError: MLA is not supported on CPU."
    return (
        "ImportError: cannot import name 'compile_flash_attn_varlen_func_from_specs' from "
        "'vllm.v1.attention.backends.fa_utils'"
    )


_MESSAGES: dict[str, Callable[[Version, Mapping[str, Any]], str | None]] = {
    "kv_heads": _kv_heads, "length": _length, "float16": _float16, "bfloat16": _bfloat16, "kv_dtype": _kv_dtype,
    "cpu_latents": _cpu_latents,
}  # fmt: skip


def predict_failure(
    architecture: Architecture, chosen: Resolved, rank: RankPlan, pool: PoolSpec, held: PoolCapacity
) -> Failure | None:
    """Return the first failure that, by the plan, stops vLLM's start, or None.

    ``rank`` is the rank with the smallest pool.
    """
    return next(_failures(architecture, chosen, rank, pool, held), None)


def _failures(
    architecture: Architecture, chosen: Resolved, rank: RankPlan, pool: PoolSpec, held: PoolCapacity
) -> Iterator[Failure]:
    flags, version = chosen.flags, chosen.version
    yield from _without_class(architecture, version)
    if flags.device == "cpu":
        yield from _sparse_on_cpu(architecture, version)
    else:
        yield from _too_few_gpus(chosen)
        yield from _in_use(chosen)
        if rank.weights_bytes > chosen.device_memory:
            yield Failure("", f"{_OUT_OF_MEMORY} (while the weights are loaded)")
    if not pool.demands:
        return
    beside = rank.used_bytes - rank.kv_pool_bytes
    given = flags.kv_cache_memory_bytes
    available = given if given is not None else chosen.limit - beside
    if flags.num_gpu_blocks_override is not None:
        available = held.num_blocks * pool.layout.bytes_per_block
    if given is not None and rank.used_bytes > rank.total_bytes:
        yield Failure("", _given_too_much(chosen, rank))
    if available <= 0:
        yield Failure("", _no_blocks(version))
    needed = held.blocks_per_sequence * pool.layout.bytes_per_block
    if needed > available:
        longest = pool.longest(held.num_blocks, chosen.max_model_len)
        yield Failure("", _one_request(version, chosen.max_model_len, needed, available, longest))
    states = any(group.kind == "state" for group in pool.layout.groups)
    if (
        states and flags.device != "cpu" and not flags.enforce_eager and version >= (0, 20, 0)
        and chosen.max_num_seqs > held.num_blocks and not drops_full_graphs(architecture, chosen)
    ):  # fmt: skip
        yield Failure(
            f"--max-num-seqs {chosen.max_num_seqs:,} is above the {held.num_blocks:,} blocks of the pool, of which "
            f"every running sequence takes one for its state: --max-num-seqs {held.num_blocks} would start, and "
            "so would --enforce-eager",
            f"ValueError: max_num_seqs ({chosen.max_num_seqs}) exceeds available Mamba cache blocks "
            f"({held.num_blocks}). Each decode sequence requires one Mamba cache block, so CUDA graph capture "
            f"cannot proceed. Please lower max_num_seqs to at most {held.num_blocks} or increase "
            "gpu_memory_utilization.",
        )


def notes(architecture: Architecture, chosen: Resolved, rank: RankPlan, beside: int) -> tuple[str, ...]:
    """Return notes on how vLLM's start may fail although the plan fits, and on the memory margin.

    ``beside`` is the bytes of CUDA graphs outside the share of --gpu-memory-utilization.
    """
    return (
        *_fallback_notes(architecture, chosen.version),
        *_transformers_notes(architecture, chosen.version),
        *_memory_notes(chosen, rank, beside),
    )


def _fallback_notes(architecture: Architecture, version: Version) -> tuple[str, ...]:
    """Return a note if vLLM runs transformers' modules because it has no own class for the model."""
    if class_of(architecture, version) is not None or not _runs_modules(architecture, version):
        return ()
    return (
        f"vLLM {'.'.join(map(str, version))} has no class {architecture.class_name}: it runs transformers' modules "
        "(--model-impl transformers), for which no start was compared with a plan",
    )


def _transformers_notes(architecture: Architecture, version: Version) -> tuple[str, ...]:
    """Return a note if the model is newer than the transformers version that this vLLM requires.

    Such a model starts only with its own code, or with a newer transformers.
    """
    minor, name = ".".join(map(str, version[:2])), architecture.model_type
    if minor not in _architectures()["unknown_before_5"].get(name, ()):
        return ()
    needs = _architectures()["transformers"][minor]
    return (
        f"vLLM {'.'.join(map(str, version))} requires transformers {needs}, which does not know {name}: without a newer "
        f"one, or code of the model's own, it stops with 'The checkpoint you are trying to load has model type `{name}` "
        "but Transformers does not recognize this architecture.'",
    )


def _memory_notes(chosen: Resolved, rank: RankPlan, beside: int) -> tuple[str, ...]:
    flags = chosen.flags
    if flags.device == "cpu" or flags.gpu is None:
        return ()
    if flags.kv_cache_memory_bytes is not None:
        room = rank.free_bytes - flags.device_memory_used
        if 0 <= room < rank.activation_bytes // 2:
            return (
                f"{gib(room)} are left beside a KV cache of given size: where the terms above are that much too "
                "low, the start fails with 'CUDA out of memory occurred when warming up sampler with "
                f"{chosen.max_num_seqs} dummy requests'; a smaller --max-num-seqs or --kv-cache-memory-bytes leaves "
                "more",
            )
        return ()
    room = chosen.device_memory - chosen.limit - flags.device_memory_used
    if beside and beside > room:
        return (
            f"CUDA graphs (and attention's workspace), about {gib(beside)}, are captured outside the share of "
            f"--gpu-memory-utilization, where {gib(max(0, room))} are left: the capture may run out of memory; a share "
            f"{(beside - room) / chosen.device_memory:.3f} lower leaves enough, and so does --enforce-eager",
        )
    return ()


def _without_class(architecture: Architecture, version: Version) -> Iterator[Failure]:
    if class_of(architecture, version) is not None or _runs_modules(architecture, version):
        return
    name, known = (*architecture.declared, architecture.class_name)[0], _architectures()
    first, until = known["first"].get(name), known["until"].get(name)
    last = until or known["removed"].get(name)
    text = ".".join(map(str, version))
    unsupported = (
        f"ValueError: Model architectures ['{name}'] are not supported for now. Supported architectures: ..."
    )
    if first is not None and version[:2] < parse_version(first)[:2]:
        needs = known["transformers"].get(first)
        beside = f" (with transformers {needs})" if needs else ""
        yield Failure(
            f"vLLM {text} has no class {name}: --engine-version {first}.0{beside} is the first that has; unless the "
            "transformers beside an older one knows the model, and then its own modules run, with other memory",
            unsupported,
        )
    elif last is not None:
        removed = (
            f"ValueError: Model architecture {name} was supported in vLLM until v{until}, and is not supported "
            "anymore. Please use an older version of vLLM if you want to use this model architecture."
        )
        yield Failure(
            f"vLLM {text} has no class {name} any more: --engine-version {last} is the last that has",
            removed if until is not None else unsupported,
        )
    else:
        yield Failure(
            f"vLLM {text} has no class {name}, and no release from 0.8.5 to 0.33.0 has: --engine hf is planned; unless "
            "code of the model's own is written for transformers' attention functions",
            unsupported,
        )


# Suffixes of class names. If the registry lacks a class, vLLM runs the class of the same model with another
# suffix, for pooling with an adapter (_SUFFIX_TO_DEFAULTS in config/model.py, _normalize_arch in registry.py).
_SUFFIXES = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding", "EmbeddingModel",
    "ForSequenceClassification", "ForTokenClassification", "ForAudioClassification", "ForImageClassification",
    "ForVideoClassification", "ClassificationModel", "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip


def class_of(architecture: Architecture, version: Version) -> str | None:
    """Return the name of vLLM's class for the model, or None if this vLLM version has none.

    It is the first class in the config's ``architectures`` that vLLM's registry has. If the registry has none
    of them, it is the first that the registry has with another suffix, such as ForCausalLM. If the config
    declares no class, the class follows from its model type.
    """
    names = architecture.declared or (architecture.class_name,)
    for name in names:
        if _has_class(name, version):
            return name
    for name in names:
        suffix = next((end for end in _SUFFIXES if name.endswith(end)), None)
        if suffix is not None:
            for other in _SUFFIXES:
                if _has_class(name.removesuffix(suffix) + other, version):
                    return name.removesuffix(suffix) + other
    # VLLM.check_encoder refuses encoders that no release of vLLM supports.
    if architecture.kind == "encoder" and not architecture.is_classifier:
        later = names[0] in _architectures()["first"] or names[0] in _architectures()["oldest"]
        return None if later else architecture.class_name
    # transformers spells some names in another way: PhimoeForCausalLM is vLLM's PhiMoEForCausalLM.
    plain = _plain_name(architecture.class_name)
    spelled = () if architecture.declared else (*_architectures()["oldest"], *_architectures()["first"])
    return next((name for name in spelled if _plain_name(name) == plain and _has_class(name, version)), None)


def is_pooling_class(architecture: Architecture) -> bool:
    """Return whether vLLM runs a decoder as a pooling model by default, without --runner.

    It does so for classifiers, for classes that pool the hidden states themselves, and for model classes
    without an output head, such as LlamaModel.
    """
    name = architecture.class_name
    if architecture.kind != "decoder" or architecture.is_classifier or architecture.pooled:
        return architecture.is_classifier or architecture.pooled
    causal = name.removesuffix("Model") + "ForCausalLM"
    return name.endswith("Model") and causal in {*_architectures()["oldest"], *_architectures()["first"]}


def _plain_name(name: str) -> str:
    return name.replace("_", "").lower()


def _has_class(name: str, version: Version) -> bool:
    """Return whether the model registry of vLLM ``version`` has the class ``name``."""
    known = _architectures()
    first = known["first"].get(name)
    last = known["until"].get(name) or known["removed"].get(name)
    if first is None and name not in known["oldest"]:
        return False
    if first is not None and version[:2] < parse_version(first)[:2]:
        return False
    return last is None or version <= parse_version(last)


# First vLLM release that requires transformers 5. The model classes that vLLM can run with transformers' modules
# ("by_transformers") were determined with transformers 5.
_FALLBACK = (0, 24, 0)


def _runs_modules(architecture: Architecture, version: Version) -> bool:
    """Return whether vLLM runs transformers' modules because its own registry lacks the model's class."""
    return version >= _FALLBACK and architecture.class_name in _architectures()["by_transformers"]


def _sparse_on_cpu(architecture: Architecture, version: Version) -> Iterator[Failure]:
    """Yield a start-up failure for sparse MLA (an indexer selects the latents to read) on a CPU.

    DeepSeek-V4 does not fail, because vLLM has a CPU class for it. The check is get_attn_backend_cls in
    platforms/cpu.py.
    """
    if sparse_latent(architecture):
        text = ".".join(map(str, version))
        yield Failure(
            f"vLLM {text} has no sparse attention on a CPU, and {architecture.class_name} nothing else there: a GPU "
            "(--gpu) would start",
            "NotImplementedError: Sparse Attention is not supported on CPU.",
        )


@cache
def _architectures() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("architectures.json").read_text())
    return content


def _too_few_gpus(chosen: Resolved) -> Iterator[Failure]:
    flags, here = chosen.flags, chosen.flags.num_gpus
    world, replicas = flags.tensor_parallel_size * flags.pipeline_parallel_size, flags.data_parallel_size
    if here is None or world * replicas <= here:
        return
    why = (
        f"{world * replicas} GPUs are needed (tensor {flags.tensor_parallel_size} x pipeline "
        f"{flags.pipeline_parallel_size} x data parallel {replicas}), the machine has {here}: "
    )
    if world > here:
        why += f"--tensor-parallel-size {here} --pipeline-parallel-size 1 has as many ranks as GPUs"
    else:
        why += f"--data-parallel-size {max(1, here // world)} would start"
    yield Failure(why, _gpus_message(chosen.version, world, here))


def _gpus_message(version: Version, world: int, here: int) -> str:
    if world > here:
        if version >= (0, 13, 0):
            return (
                f"ValueError: World size ({world}) is larger than the number of available GPUs ({here}) in this "
                "node. If this is intentional and you are using: - ray, set '--distributed-executor-backend ray'. "
                "- multiprocessing, set '--nnodes' appropriately."
            )
        if version >= (0, 11, 0):
            return (
                f"ValueError: Tensor parallel size ({world}) cannot be larger than the number of available GPUs "
                f"({here})."
            )
        ray = "ValueError: Unable to load Ray"  # with Ray installed, vLLM would wait for a Ray cluster instead of failing
        if version >= (0, 10, 0):
            return f"{ray}: No module named 'ray'. Ray is required for multi-node inference, please install Ray with `pip install ray`."
        return f"{ray} which is required for multi-node inference, please install Ray with `pip install ray`."
    # The message names the first local rank without a GPU. The index of that rank equals the number of GPUs.
    if version >= (0, 24, 0):
        return f"AssertionError: DP adjusted local rank {here} is out of bounds for {here} devices."
    if version >= (0, 11, 0):
        return f"AssertionError: DP adjusted local rank {here} is out of bounds."
    return "RuntimeError: CUDA error: invalid device ordinal"


def _in_use(chosen: Resolved) -> Iterator[Failure]:
    """Yield a start-up failure if other programs use GPU memory that vLLM requires to be free.

    With --kv-cache-memory-bytes, vLLM does not check the free memory before it allocates.
    """
    flags, version, used = chosen.flags, chosen.version, chosen.flags.device_memory_used
    if not used or flags.kv_cache_memory_bytes is not None or version < (0, 9, 0):
        return
    free = chosen.device_memory - used
    if free >= chosen.limit:
        return
    where = "cuda:0 " if version >= (0, 14, 0) else ""
    share = free / chosen.device_memory
    yield Failure(
        f"{gib(used)} of the device are in use by others, and vLLM wants its whole share of {gib(chosen.limit)} "
        f"free: --gpu-memory-utilization {int(share * 100) / 100:g} would pass",
        f"ValueError: Free memory on device {where}({_rounded(free)}/{_rounded(chosen.device_memory)} GiB) on startup "
        f"is less than desired GPU memory utilization ({flags.gpu_memory_utilization:g}, "
        f"{_rounded(chosen.limit)} GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
        "processes.",
    )


def _given_too_much(chosen: Resolved, rank: RankPlan) -> str:
    """Return vLLM's error message if a KV pool of --kv-cache-memory-bytes does not fit into memory.

    With this flag, vLLM runs no memory profile. On a GPU it allocates the pool and then warms up the sampler,
    so one of these allocations fails. On a CPU, vLLM checks before the allocation that the memory is free.
    """
    if chosen.flags.device == "cpu":
        free = max(0, rank.free_bytes + rank.kv_pool_bytes)
        return (
            f"ValueError: Available memory on node 0 ({_rounded(free)}/{_rounded(rank.total_bytes)} GiB) on kv cache "
            f"allocation is less than requested memory for kv ({_rounded(rank.kv_pool_bytes)} GiB). Decrease "
            "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
        )
    if rank.used_bytes - rank.activation_bytes > rank.total_bytes:
        return f"{_OUT_OF_MEMORY} (while the KV cache is allocated)"
    return (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with "
        f"{chosen.max_num_seqs} dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when "
        "initializing the engine."
    )


def _no_blocks(version: Version) -> str:
    text = (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine"
    )
    if version < (0, 13, 0):
        return f"{text}."
    if version < (0, 22, 0):
        return f"{text}.{_DOCS}"
    return (
        f"{text} (this flag also controls CPU memory reservation on the CPU backend, despite its name).{_DOCS}"
    )


def _one_request(version: Version, length: int, needed: int, available: int, longest: int) -> str:
    if version < _V1:
        return (
            f"ValueError: The model's max seq len ({length}) is larger than the maximum number of tokens that can "
            f"be stored in KV cache ({longest}). Try increasing `gpu_memory_utilization` or decreasing "
            "`max_model_len` when initializing the engine."
        )
    size = _fixed if version < (0, 14, 0) else _rounded
    if version < (0, 8, 4):
        unit = "GB" if version < (0, 8, 3) else "GiB"
        return (
            f"ValueError: To serve at least one request with the models's max seq len ({length}), ({size(needed)} {unit} "
            f"KV cache is needed, which is larger than the available KV cache memory ({size(available)} {unit}). Try "
            "increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
        )
    whose = "model's" if version >= (0, 22, 0) else "models's"
    estimated = (
        f" Based on the available memory, the estimated maximum model length is {longest}." if longest else ""
    )
    if version < (0, 9, 0):  # before 0.9, vLLM's message has the space after this sentence, not before it
        estimated = estimated.removeprefix(" ") + " "
    increase = "`gpu_memory_utilization`"
    if version >= (0, 22, 0):
        increase += " (which also controls CPU memory on the CPU backend)"
    return (
        f"ValueError: To serve at least one request with the {whose} max seq len ({length}), ({size(needed)} GiB "
        f"KV cache is needed, which is larger than the available KV cache memory ({size(available)} GiB)."
        f"{estimated} Try increasing {increase} or decreasing `max_model_len` when initializing the engine."
        f"{_DOCS if version >= (0, 13, 0) else ''}"
    )


def _rounded(size: int) -> str:
    """Return ``size`` bytes as a text in GiB, as vLLM's format_gib prints it (utils/mem_utils.py)."""
    return f"{round(size / GiB, 2)}"


def _fixed(size: int) -> str:
    return f"{size / GiB:.2f}"
