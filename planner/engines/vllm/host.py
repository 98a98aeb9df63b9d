"""Host memory of vLLM's processes on GPUs, divided by purpose. Source files named here are from vLLM 0.32.

The sources of 0.30, 0.31 and 0.33 were read too. The processes are an API server, the engine core, and one
worker per rank (v1/executor/multiproc_executor.py). With one rank, the engine core is also the worker ("uni",
config/parallel.py).
"""

from __future__ import annotations

from tonnage.planner.engines.runtime.api import API_LIMIT_BYTES
from tonnage.planner.engines.runtime.gpu import has_towers
from tonnage.planner.engines.runtime.host import HostInputs, page_cache, pinned, reading
from tonnage.planner.engines.vllm import cpu
from tonnage.planner.engines.vllm.versions import on_second_runner, rules
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.model.host import HostMemory, HostPart
from tonnage.planner.model.tier import INDEX_GROWTH
from tonnage.planner.units import GiB, MiB, ceil_div, gib

_READ = (0, 30, 0)  # first vLLM version whose source was read for these rules

# Anonymous memory of a GPU worker holds imports, CUDA, NCCL and compiled kernels. The values are assumed from
# reports in vllm-project/vllm: 2.99 GiB while loading (#57469, anon-rss), 3 GB of RSS with the libraries' files
# (#48436), 4 GB of a whole pod (#3035).
_WORKER, _WORKER_LOW, _WORKER_HIGH = 5 * GiB // 2, GiB, 5 * GiB
# Importing torch with CUDA may add this memory to the API server and the engine core; the value is assumed.
_CUDA_IMPORTS = GiB // 2
_PICTURES = GiB  # assumed bytes of images that the API process decodes at a time

# Bytes of vLLM's cache of compiled grammars (VLLM_XGRAMMAR_CACHE_MB in envs.py).
_GRAMMARS = 512 * MiB
# Bytes per block in the engine core's block pool, for blocks without and with a hash. They are the block's
# objects, and with a hash also its entry in the prefix index (RssAnon of v1/core/block_pool.py, measured by
# benchmarks/host_memory.py).
_BLOCK, _HASHED_BLOCK = 136, 282
# Bytes of one token id of a request: an int of 28 bytes and its list entry of 8 (CPython 3.11), in the API
# process and in the engine core. The engine core has a second list entry, for prompt and output together.
_TOKEN = 2 * (28 + 8) + 8

# Sizes of ring buffers in /dev/shm (distributed/device_communicators/shm_broadcast.py). One buffer for messages
# to all workers has ten chunks of VLLM_MQ_MAX_CHUNK_BYTES_MB. Each worker has one for its replies, with ten
# chunks of 24 MiB. Each tensor-parallel group has one with six chunks of 4 MiB (parallel_state.py).
# check_shm_free_space requires their full size at creation, but pages are allocated on use.
_CHUNKS, _TO_WORKERS, _FROM_WORKER = 10, 16 * MiB, 24 * MiB
_GROUP_CHUNKS, _GROUP_CHUNK = 6, 4 * MiB
# Without direct GPU-to-GPU access, ranks have NCCL buffers in host memory, with the size seen in a trace
# (tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark#8). The upper bound is assumed: one send and one receive buffer
# in each of 32 channels.
_NCCL_BUFFER, _NCCL_BUFFERS = 9641984, 64

# vLLM's V0 engine allocated this default of --swap-space per GPU (config.py of 0.7 and worker/cache_engine.py).
_SWAP = 4 * GiB
_V1 = (0, 8, 0)
_SOURCE = "--kv-offloading-size, --kv-transfer-config"


def host_memory(hosted: HostInputs) -> HostMemory:
    """Return the host memory of all vLLM processes of one replica, part by part, and its page cache."""
    parts = (
        *_processes(hosted), *_pinned(hosted), *reading(hosted), *_queues(hosted), *_pictures(hosted),
        *_grammars(hosted), *_offloaded(hosted), *_tier(hosted),
    )  # fmt: skip
    return HostMemory(parts, page_cache(hosted))


def _processes(hosted: HostInputs) -> list[HostPart]:
    ranks, vocabulary = len(hosted.ranks), hosted.architecture.vocab_size
    low, high = cpu.VLLM_INTERVAL
    api = cpu.api_bytes(vocabulary)
    # With one rank, the engine core is also the worker, and _WORKER already counts its imported modules.
    imports = cpu.VLLM_CORE_BYTES if ranks > 1 else 0
    core = imports + vocabulary * cpu.VLLM_CORE_TOKEN_BYTES
    blocks, tokens = hosted.num_blocks, hosted.tokens * _TOKEN
    more = _PICTURES if has_towers(hosted.architecture) else 0
    measured = "RssAnon of vLLM 0.32.0, measured on a CPU"
    return [
        HostPart(
            "API process", api, int(api * low), int(api * high) + _CUDA_IMPORTS + API_LIMIT_BYTES + more,
            f"{cpu.VLLM_API_BYTES:,} + vocabulary {vocabulary:,} x {cpu.VLLM_API_TOKEN_BYTES:,}; above it "
            f"bodies at once {API_LIMIT_BYTES:,}" + (f", pictures {more:,}" if more else ""), measured,
        ),
        HostPart(
            "engine core", core, int(core * low), int(core * high) + (_CUDA_IMPORTS if imports else 0),
            f"{imports:,} + vocabulary {vocabulary:,} x {cpu.VLLM_CORE_TOKEN_BYTES:,}", measured,
        ),
        HostPart(
            "workers", ranks * _WORKER, ranks * _WORKER_LOW, ranks * _WORKER_HIGH,
            f"{ranks} x {_WORKER:,}: imports, CUDA, NCCL, compiled kernels",
            "assumed, from reports (vllm-project/vllm#57469, 48436, 3035)",
        ),
        HostPart(
            "blocks and requests", blocks * _HASHED_BLOCK + tokens // 2, blocks * _BLOCK,
            blocks * _HASHED_BLOCK + 2 * tokens,
            f"{blocks:,} blocks x {_HASHED_BLOCK} + half of {hosted.tokens:,} tokens x {_TOKEN}",
            "v1/core/block_pool.py, measured; sizes of CPython's lists", "serving",
        ),
    ]  # fmt: skip


def _pinned(hosted: HostInputs) -> list[HostPart]:
    """Return the host memory of token ids and positions in each worker, for all running sequences.

    The V2 model runner pins every token id of each sequence (v1/worker/gpu/states.py). For models with
    M-RoPE it also pins every position (mm/rope.py). The V1 model runner does not pin token ids, so their
    pages are allocated on use (v1/worker/gpu_input_batch.py). It pins block tables and the embeddings of a
    step.
    """
    chosen, architecture, ranks = hosted.chosen, hosted.architecture, len(hosted.ranks)
    cells = chosen.max_num_seqs * chosen.max_model_len
    rows = f"{chosen.max_num_seqs:,} sequences x {chosen.max_model_len:,} tokens"
    if on_second_runner(architecture, rules(chosen.version)):
        axes = 3 if architecture.rotary is not None and architecture.rotary.mrope else 0
        exact = cells * 4 * (1 + axes)
        value = pinned(cells * 4) + pinned(cells * 4 * axes)
        formula = f"{ranks} x {rows} x 4" + (f" x (1 + {axes} axes)" if axes else "")
        formula += ", each pinned: rounded up to a power of two"
        source = "v1/worker/gpu/states.py, mm/rope.py; --max-num-seqs, --max-model-len"
        return [HostPart("token ids", ranks * value, ranks * exact, ranks * value, formula, source)]
    tables = chosen.max_num_seqs * ceil_div(chosen.max_model_len, hosted.layout.block_size) * 4
    tables *= max(1, len(hosted.layout.groups))
    step = chosen.max_num_batched_tokens * architecture.hidden_size * DTYPE_BYTES[chosen.flags.dtype]
    exact, value = tables + step, pinned(tables) + pinned(step)
    used = min(5 * hosted.tokens, 5 * cells)
    source = "v1/worker/gpu_input_batch.py, gpu_model_runner.py; --max-num-seqs, --max-model-len"
    return [
        HostPart(
            "token ids", ranks * (value + used), ranks * exact, ranks * (value + 5 * cells),
            f"{ranks} x (block tables {tables:,} and embeddings {step:,}, pinned + {rows} x 5, as they are "
            "used)",
            source,
        )
    ]  # fmt: skip


def _queues(hosted: HostInputs) -> list[HostPart]:
    ranks, flags = len(hosted.ranks), hosted.chosen.flags
    if ranks == 1:
        return []
    rings = (_TO_WORKERS + 1 + ranks) * _CHUNKS + ranks * (_FROM_WORKER + 2) * _CHUNKS
    if flags.tensor_parallel_size > 1:
        each = (_GROUP_CHUNK + flags.tensor_parallel_size) * _GROUP_CHUNKS
        rings += flags.pipeline_parallel_size * each
    nccl = ranks * _NCCL_BUFFERS * _NCCL_BUFFER
    return [
        HostPart(
            "message queues", 0, 0, rings,
            f"rings of {rings:,} bytes, whose pages come with use: one to {ranks} workers, one from each, one "
            "in each tensor-parallel group", "distributed/device_communicators/shm_broadcast.py", shared=True,
        ),
        HostPart(
            "NCCL", 0, 0, nccl,
            f"{ranks} ranks x up to {_NCCL_BUFFERS} buffers of {_NCCL_BUFFER:,}; none where every GPU reaches "
            "every other",
            "assumed, from a trace (tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark#8)", shared=True,
        ),
    ]  # fmt: skip


def _pictures(hosted: HostInputs) -> list[HostPart]:
    """Return the host memory of vLLM's cache of processed images.

    With one API server and one replica, the engine core keeps the images and the API process only their hashes.
    Otherwise the API processes keep the images and the engine core only their hashes
    (multimodal/cache/factories.py). vLLM's documentation counts the images in both processes, so versions
    before 0.30 are assumed to keep them in both.
    """
    size = hosted.chosen.flags.mm_processor_cache_bytes
    if not size or not has_towers(hosted.architecture):
        return []
    both = 1 if hosted.chosen.version >= _READ else 2
    return [
        HostPart(
            "processed pictures", size, 0, both * size, f"cache of {size:,}, once it is full",
            "--mm-processor-cache-gb; multimodal/cache/factories.py", "serving",
        )
    ]  # fmt: skip


def _grammars(hosted: HostInputs) -> list[HostPart]:
    if hosted.architecture.kind == "encoder":
        return []
    return [
        HostPart("grammars", 0, 0, _GRAMMARS, f"compiled for answers, at most {_GRAMMARS:,}",
                 "VLLM_XGRAMMAR_CACHE_MB (envs.py)", "serving")
    ]  # fmt: skip


def _offloaded(hosted: HostInputs) -> list[HostPart]:
    """Return the host memory of model weights that vLLM offloads from the GPU.

    --cpu-offload-gb pins each weight (model_executor/offloader/uva.py), and sleep mode pins each allocation
    (device_allocator/cumem.py).
    """
    found, flags = [], hosted.chosen.flags
    away = sum(rank.offloaded_bytes for rank in hosted.ranks)
    if away:
        found.append(
            HostPart(
                "offloaded weights", away * 3 // 2, away, 2 * away,
                f"{gib(away)} of all ranks, each tensor pinned: rounded up to a power of two",
                "--cpu-offload-gb; 1.9 times in vllm-project/vllm#56410, 1.78 measured for experts",
            )
        )  # fmt: skip
    if flags.enable_sleep_mode:
        weights = sum(rank.weights_bytes for rank in hosted.ranks)
        found.append(
            HostPart(
                "weights while asleep", weights, 0, 2 * weights,
                f"{gib(weights)} of all ranks at level 1, pinned",
                "--enable-sleep-mode; device_allocator/cumem.py", "serving",
            )
        )  # fmt: skip
    if hosted.chosen.version < _V1:
        ranks = len(hosted.ranks)
        found.append(
            HostPart(
                "swap space", ranks * _SWAP, 0, ranks * _SWAP, f"{ranks} x {_SWAP:,}, pinned",
                "--swap-space of V0 (config.py of 0.7)",
            )
        )  # fmt: skip
    return found


def _tier(hosted: HostInputs) -> list[HostPart]:
    """Return the host memory of KV offloading tiers that vLLM's own processes hold."""
    return [
        HostPart(
            "KV tier" if tier.chunks is not None else "KV tier's buffers", tier.value, tier.low,
            tier.value if tier.high is None else tier.high, tier.formula, f"{_SOURCE}; {tier.source}",
            "serving" if tier.shared else "always", shared=tier.shared,
        )
        for tier in hosted.tiers
        if tier.medium == "host" and not tier.outside and tier.value is not None
    ] + [
        HostPart(
            "disk tier index", tier.index, 0, INDEX_GROWTH * tier.index,
            f"{tier.chunks:,} files, when the folder is full", "benchmarks/host_memory.py", "serving",
        )
        for tier in hosted.tiers
        if tier.index
    ]  # fmt: skip
