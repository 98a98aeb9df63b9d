"""SGLang's token pools: one slot per token, with separate pools for full and sliding-window layers.

The source is sglang/srt/mem_cache/memory_pool.py and model_executor/model_runner.py (0.5), pool_configurator.py
and mem_cache/kv_cache_configurator.py (0.5.23). SWAKVPool has a pool of N tokens for full-attention layers and
one of N x swa_full_tokens_ratio tokens for sliding-window layers. max_total_num_tokens is N. "GB" in SGLang's
log means GiB. The rules are checked against the logs in tests/data/field_reports.jsonl.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of
from tonnage.planner.engines import sglang_serve, sglang_tier
from tonnage.planner.engines import sglang_states as states
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.log import (
    NUMBER,
    LogFigures,
    arguments,
    compiled,
    number,
    read_figures,
    squeezed,
)
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec, heads_per_rank, token_pool
from tonnage.planner.engines.runtime.gpu import has_towers
from tonnage.planner.engines.runtime.host import HostInputs
from tonnage.planner.engines.tensors import merged_tensors
from tonnage.planner.engines.version import Version
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.model.dtypes import KV_DTYPE_BYTES
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.model.tier import KVTier
from tonnage.planner.plans import Failure, Plan, RankPlan, Resolved
from tonnage.planner.quantization.kv_cache import StoredCache
from tonnage.planner.units import GiB, MiB, ceil_div

_AMPERE, _BLACKWELL = (8, 0), (10, 0)
_LOG_LINES = (
    ("weights_bytes", GiB, rf"Load weight end\..*mem usage={NUMBER}GB"),
    ("tokens", 1, rf"max_total_num_tokens={NUMBER}"),
    ("max_model_len", 1, rf"context_len={NUMBER}"),
    ("kv_pool_bytes", GiB, rf"SWAKVPool mem usage: {NUMBER}GB"),
    ("cuda_graph_bytes", GiB, rf"Capture (?!draft)\w* graph end\..*?mem usage={NUMBER}GB"),
    ("free_bytes", GiB, rf"Load weight begin\. avail mem={NUMBER}GB"),
    ("free_after_pool_bytes", GiB, rf"Memory pool end\. avail mem={NUMBER}GB"),
)
# SGLang logs "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 148717, K size: 10.21 GB, V size: 10.21
# GB".
# With latent attention, SGLang logs "KV size: 9.10 GB" instead. Releases up to 0.4 log no tokens.
_LOG_POOL = (
    rf"KV Cache is allocated\.(?:.*?#tokens: (\d[\d,]*),)?.*?KV? size: {NUMBER}GB(?:, V size: {NUMBER}GB)?"
)
_LOG_STATES = rf"Mamba Cache is allocated\..*?conv_state size: {NUMBER}GB.*?ssm_state size: {NUMBER}GB"
_LOG_WINDOWS = rf"swa size: {NUMBER}, full size: {NUMBER}"
_LOG_FORMAT = r"Load weight end\..*quant=(\w+)"
# SGLang 0.5.23 allocates the token pool after it captured CUDA graphs. The "VA upper bound" that SGLang logs
# before the capture is only reserved address space.
_LOG_MAPPED = rf"Post-capture KV sizing: KV cache allocated\..*?#tokens: (\d[\d,]*), KV size: {NUMBER}GB"
_LOG_ARGUMENTS = (("server_args=ServerArgs(", "="), ("server_args={", ":"))
_LOG_NAMES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "model_path": "model",
    "page_size": "block_size",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "disable_cuda_graph": "enforce_eager",
}
_LOG_RANK = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d((?: [A-Z]+\d+)+)\]"
_LOG_READY = "The server is fired up and ready to roll"
_SPARSE_ROW = 656  # bytes of a token in sparse MLA: 512 fp8 values, 4 fp32 scales, 64 bf16 rotary values
_MEM_FRACTION = 0.88  # default mem_fraction_static on one GPU (server_args.py, 0.4)

# From 0.5.4 on (pull request 10975), the defaults of chunked prefill, graphs and mem_fraction_static depend on
# the device's memory. Each entry of _DEVICES is (upper bound of the memory in GiB, chunked_prefill_size, tokens
# of the largest decode graph with TP below 4, tokens of that graph with TP from 4 on).
# Source: handle_gpu_memory_settings in arg_groups/memory_hook.py of 0.5.23. In earlier releases, the largest
# decode graph on GPUs of 20 to 35 GiB with TP below 4 has 24 tokens instead of 48.
_BY_DEVICE = (0, 5, 4)
_DEVICES = (
    (20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512),
    (1 << 40, 16384, 512, 512),
)  # fmt: skip
# Oldest SGLang release, of those whose source was read, whose mem_fraction_static includes a draft model's
# weights and pools.
_DRAFTS = (0, 5, 15)
# Oldest SGLang release, of those whose source was read, that captures prefills in CUDA graphs by default.
_PREFILL_GRAPHS = (0, 5, 23)

# Token counts for which prefill graphs are captured, as ranges (first, end, step)
# (generate_prefill_cuda_graph_batch_sizes).
_CAPTURED = (
    (4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, 1 << 20, 512),
)  # fmt: skip
# First release in which --kv-cache-dtype auto follows the checkpoint, by quantization tool.
# configure_kv_cache_dtype reads kv_cache_quant_algo of the quantization's class. NVFP4's class has this
# attribute from 0.5.3 on, the others of ModelOpt from 0.5.4, fp8 and mxfp8 from 0.5.18, and compressed-tensors
# from 0.5.19 (layers/quantization).
_STORED_CACHE = {"modelopt": (0, 5, 4), "fp8": (0, 5, 18), "compressed-tensors": (0, 5, 19)}
_STORED_CACHE_NVFP4 = (0, 5, 3)
# SGLang multiplies mem_fraction_static by this factor for a multimodal model whose image encoder is as large as
# ViT-L/14 (adjust_mem_fraction_for_vlm). For other encoders the factor is 0.76 to 0.998.
_WITH_PICTURES = 0.95


class SGLang(Engine):
    """The SGLang engine, which divides mem_fraction_static of device memory between weights and token pools."""

    name = "sglang"
    title = "SGLang"
    newest = (0, 5, 23)
    oldest = (0, 4, 0)  # first SGLang whose default mem_fraction_static is known

    # For each device type: default max_running_requests and chunked_prefill_size (server_args.py, 0.5).
    batch: ClassVar = {"cpu": (256, 2048), "cuda": (256, 2048)}
    blocks: ClassVar = {"cpu": 1, "cuda": 1}  # SGLang's default page_size is 1 token
    drafts = True
    fp8_kv_cache = True
    logs = True
    log_figures: ClassVar = {"weights_bytes": "", "kv_pool_bytes": "", "tokens": "", "cuda_graph_bytes": ""}

    def memory_limit(self, flags: Deployment, memory: int, share: float) -> int:
        """Return the whole device memory, because ``static_share`` already limits weights and token pools."""
        return memory

    def default_batch(self, flags: Deployment, memory: int, version: Version) -> tuple[int, int]:
        """Return SGLang's default values (max_running_requests, chunked_prefill_size).

        From 0.5.4 on, they depend on the GPU's memory.
        """
        sequences, tokens = self.batch[flags.device]
        if flags.device == "cuda" and version >= _BY_DEVICE:
            tokens = _device(memory)[1]
        return sequences, tokens

    def static_share(
        self, flags: Deployment, version: Version, memory: int, tokens: int, architecture: Architecture
    ) -> float | None:
        """Return mem_fraction_static: the share of device memory for weights and token pools.

        The default leaves memory for activations and CUDA graphs. The amounts in MiB that SGLang reserves for
        them are from its function handle_gpu_memory_settings.
        """
        if flags.mem_fraction_static is not None:
            return flags.mem_fraction_static
        if flags.device != "cuda" or version < _BY_DEVICE:
            return _MEM_FRACTION
        ranks = flags.tensor_parallel_size * flags.pipeline_parallel_size
        reserved = 512 + 1.5 * max(tokens, 2048) + 128 * ranks
        if not flags.enforce_eager:
            largest = _device(memory)[2 if flags.tensor_parallel_size < 4 else 3]
            reserved += 2 * min(largest, flags.max_num_seqs or largest)
            if version >= _PREFILL_GRAPHS:
                reserved += _prefill_graphs(architecture, flags, tokens)
        total = memory / MiB
        if total > 60 * 1024:
            reserved = max(reserved, 10 * 1024)
        share = round((total - reserved) / total, 3)
        return max(0.001, share * _WITH_PICTURES if has_towers(architecture) else share)

    def changes(self, since: Version, until: Version) -> tuple[tuple[Version, tuple[str, ...]], ...]:
        """Return (version, descriptions of changes) of each SGLang release that changed a figure of a plan.

        The releases are those after ``since`` up to and including ``until``.
        """
        told = (
            (_STORED_CACHE_NVFP4, "--kv-cache-dtype auto takes the FP8 cache of ModelOpt's NVFP4 checkpoints"),
            (_BY_DEVICE, "chunked_prefill_size and mem_fraction_static follow from the device's memory"),
            (
                _STORED_CACHE["modelopt"],
                "--kv-cache-dtype auto takes the FP8 cache of all ModelOpt checkpoints",
            ),
            (_STORED_CACHE["fp8"], "--kv-cache-dtype auto takes the FP8 cache of fp8 checkpoints"),
            (_STORED_CACHE["compressed-tensors"], "and of compressed-tensors checkpoints"),
            (_PREFILL_GRAPHS, "prefills are captured in CUDA graphs: mem_fraction_static leaves room for them"),
        )
        return tuple((version, (words,)) for version, words in told if since < version <= until)

    def choose_dtype(self, flags: Deployment, architecture: Architecture, auto: str) -> str:
        """Return the dtype that the model is loaded in.

        - float32 checkpoints are loaded in 16 bits (_get_and_verify_dtype, configs/model_config.py).
        - For models with vision or audio towers, SGLang reads the dtype of the text model's config, which is
          bfloat16 in all known models.
        - GPUs before Ampere always compute in float16 (maybe_downgrade_dtype_for_legacy_gpu,
          load_model_utils.py).
        """
        if (capability_of(flags.gpu) or _AMPERE) < _AMPERE:
            return "float16"
        if flags.dtype != "auto" or auto != "float32":
            return super().choose_dtype(flags, architecture, auto)
        bfloat16 = architecture.model_type.startswith("gemma") or has_towers(architecture)
        return "bfloat16" if bfloat16 else "float16"

    def choose_kv_dtype(
        self, flags: Deployment, dtype: str, architecture: Architecture, version: Version,
        stored: StoredCache | None,
    ) -> str:  # fmt: skip
        """Return the KV cache dtype; ``auto`` selects an FP8 cache if the checkpoint requests one.

        For sparse MLA (with an indexer), the default depends on the GPU instead (arg_groups/overrides.py,
        0.5.23).

        Raises:
            DeploymentError: SGLang has no cache in the requested dtype.
        """
        found = super().choose_kv_dtype(flags, dtype, architecture, version, stored)
        if found == "float16" != dtype:
            raise DeploymentError(
                f"SGLang has no --kv-cache-dtype float16 for a model in {dtype}", field="--kv-cache-dtype",
                hint="auto, bfloat16 or fp8_e4m3",
            )  # fmt: skip
        if flags.kv_cache_dtype != "auto":
            return found
        if any(layer.kind == "mla" and layer.index_size for layer in architecture.cache_layers):
            return "fp8_e4m3" if (capability_of(flags.gpu) or _AMPERE) >= _BLACKWELL else found
        if stored is None or not stored.static_fp8:
            return found
        nvfp4 = stored.method == "modelopt" and stored.algorithm.upper() == "NVFP4"
        since = _STORED_CACHE_NVFP4 if nvfp4 else _STORED_CACHE[stored.method]
        return "fp8_e4m3" if version >= since else found

    def tensors(self, architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
        """Return the tensors of SGLang's modules, with padded vocabulary and one table per rotary embedding."""
        return merged_tensors(architecture)

    def decoder_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """Return the layout of SGLang's token pool on one rank, for a model that generates tokens.

        Raises:
            DeploymentError: SGLang's memory for the draft model is not known.
            UnsupportedArchitecture: SGLang's pools for the model are not known.
        """
        flags = chosen.flags
        attention = tuple(layer for layer in architecture.cache_layers if layer.kind != "state")
        if len(attention) < len(architecture.cache_layers):
            states.check(architecture, chosen)
        drafted = [layer for layer in attention if layer.layer >= architecture.layers]
        if drafted:
            # Before 0.5.15, the draft's weights and pool took memory outside the share mem_fraction_static.
            if chosen.version < _DRAFTS or flags.pipeline_parallel_size > 1:
                raise DeploymentError(
                    "SGLang's memory for a draft model is known from 0.5.15 on, without pipeline parallelism",
                    field="--speculative-model", hint="--engine-version 0.5.23",
                )  # fmt: skip
            attention = attention[: -len(drafted)]
        architecture = replace(architecture, cache_layers=attention)
        full, sliding = token_bytes(architecture, flags.kv_cache_dtype, flags.tensor_parallel_size)
        # SGLang counts each layer of a draft model as one full-attention layer of the target model.
        if drafted:
            own = sum(layer.kind != "sliding" and layer.shares is None for layer in attention)
            full += full * len(drafted) // own if own else 0
        size = int(full + flags.swa_full_tokens_ratio * sliding) if full and sliding else full or sliding
        # With --page-size, max_total_num_tokens is rounded down to whole pages (model_runner.py).
        element = KV_DTYPE_BYTES[flags.kv_cache_dtype]
        return token_pool(architecture, size, flags.kv_cache_dtype, element, chosen.block_size)

    def draft_note(self, method: str) -> str:
        """Return a note on the --speculative-algorithm option that SGLang needs for a draft of ``method``."""
        return f"SGLang takes this draft with --speculative-algorithm {method.upper()}"

    def adjust_pool(
        self, architecture: Architecture, chosen: Resolved, pool: PoolSpec, weights: int
    ) -> PoolSpec:
        """Return ``pool`` with slots for recurrent states, in a part of the memory left beside the weights."""
        slot = states.slot_bytes(architecture, chosen.flags.tensor_parallel_size)
        if not slot:
            return pool
        given = chosen.flags.kv_cache_memory_bytes
        rest = self._static_bytes(chosen) - weights if given is None else given
        each = states.slots_per_request(architecture, chosen)
        count = states.slots(rest, slot, each, chosen)
        note = (
            f"{count:,} slots of {slot:,} bytes for states, {each} to a request: {count // each:,} run at once"
        )
        apart = states.apart(count, slot, each, chosen)
        return replace(pool, apart=apart, running=count // each, notes=(*pool.notes, note))

    def most_running(self, chosen: Resolved, pool: PoolSpec, held: PoolCapacity) -> int:
        """Return the maximum number of running requests, limited by the slots for recurrent states."""
        return states.most_running(held.tokens, chosen, pool.running) if pool.demands else chosen.max_num_seqs

    def predict_failure(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, pool: PoolSpec, held: PoolCapacity
    ) -> Failure | None:
        """Return a start-up failure if memory cannot hold the recurrent states of one request, else None."""
        return states.TOO_FEW if pool.running == 0 else None

    def num_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of pages of the token pool, which gets the memory left beside recurrent states."""
        given = chosen.flags.kv_cache_memory_bytes
        if given is not None and pool.apart:
            return max(0, given - pool.apart) // size
        return super().num_blocks(chosen, pool, size, fixed, weights)

    def block_bounds(
        self, chosen: Resolved, pool: PoolSpec, size: int, fixed: tuple[int, int], weights: tuple[int, int],
        framework: int,
    ) -> tuple[int, int]:  # fmt: skip
        """Return the lower and upper bound of the number of pages in the token pool.

        mem_fraction_static is a share of the memory that is free when the model's loading begins. The lower
        bound assumes that all framework memory is allocated before that moment, so that less is free.
        """
        low, high = super().block_bounds(chosen, pool, size, fixed, weights, framework)
        given = chosen.flags.kv_cache_memory_bytes is not None
        return (low if given else max(0, low - ceil_div(framework, size))), high

    def free_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of token-pool pages that fit beside the weights.

        Weights and token pool share mem_fraction_static x device memory.
        """
        return max(0, self._static_bytes(chosen) - weights - pool.apart) // size

    def _static_bytes(self, chosen: Resolved) -> int:
        share = chosen.flags.mem_fraction_static
        assert share is not None  # resolving the flags sets mem_fraction_static to the result of static_share
        return int(chosen.device_memory * share)

    def read_log_line(self, line: str, out: LogFigures) -> None:
        """Add the bytes of pools, states and graphs, and server arguments, of one log line to ``out``."""
        text = squeezed(line)
        read_figures(self.name, _LOG_LINES, text, out)
        if "Memorypoolend" in text:
            out.state.add("pools are complete")  # later KV pools in the log are those of a draft model
        if match := compiled(_LOG_POOL).search(text):
            out.engine = self.name
            if "pools are complete" not in out.state:
                out.pools += (number(match[2]) + number(match[3] or "0")) * GiB
                # SGLang logs one line for the pool of sliding-window layers and one for that of full-attention
                # layers. The pool with more tokens is that of full-attention layers.
                if match[1]:
                    out.cells = max(out.cells, number(match[1]))
        if match := compiled(_LOG_STATES).search(text):
            out.engine, out.pools = self.name, out.pools + (number(match[1]) + number(match[2])) * GiB
        if match := compiled(_LOG_MAPPED).search(text):
            out.engine, out.pools = self.name, number(match[2]) * GiB
            out.cells = number(match[1])
        for mark, sign in _LOG_ARGUMENTS:
            if mark not in line:
                continue
            given = dict(arguments(line.partition(mark)[2], sign))
            if given.get("disable_radix_cache") == "True":
                out.flags["enable_prefix_caching"] = "False"
            out.flags |= {_LOG_NAMES.get(key, key): value for key, value in given.items() if value != "None"}
            out.model = out.flags.get("model") or out.model
            out.engine = out.engine or self.name
        if match := compiled(_LOG_WINDOWS).search(text):
            out.flags["swa_full_tokens_ratio"] = str(number(match[1]) / max(1.0, number(match[2])))
        if (match := compiled(_LOG_FORMAT).search(text)) and match[1] != "None":
            out.flags["quantization"] = match[1]

    def log_rank(self, line: str) -> tuple[str, str]:
        """Return the tensor-parallel and pipeline rank in a log line's timestamp, such as "TP0"."""
        match = re.search(_LOG_RANK, line)
        parts = match[1].split() if match else []
        return "_".join(part for part in parts if not part.startswith(("EP", "ATTN"))), ""

    def finish_log(self, out: LogFigures) -> None:
        """Set the token count to the largest logged pool's tokens, if no scheduler line in the log has it."""
        if out.engine == self.name and out.cells:
            out.figures.setdefault("tokens", out.cells)
            out.cells = 0.0

    def log_is_ready(self, line: str) -> bool:
        """Return whether a line of SGLang's log reports that the server is ready."""
        return _LOG_READY in line

    def capacity(self, pool: PoolSpec, chosen: Resolved, num_blocks: int) -> PoolCapacity:
        """Return the token pool's capacity as SGLang's max_total_num_tokens: all token slots of all pages."""
        held = super().capacity(pool, chosen, num_blocks)
        most = held.max_concurrency if pool.running is None else min(held.max_concurrency, pool.running)
        return replace(held, tokens=num_blocks * chosen.block_size, max_concurrency=most)

    def request_law(self, architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
        """Return the rule for the number of token slots that a request takes.

        Raises:
            UnsupportedArchitecture: the model has sliding-window layers, for whose pool the rule is not known.
        """
        if any(layer.kind == "sliding" for layer in architecture.cache_layers):
            raise UnsupportedArchitecture(
                "the planner does not know how many slots a request takes in SGLang's pool of sliding layers",
                field="sliding_window",
                hint="--engine vllm",
            )
        law = super().request_law(architecture, chosen, pool)
        if pool.running is None:
            return law
        return replace(
            law,
            hit_tokens=None,
            note="states have slots of their own; where they let prefixes hit is not known",
        )

    def start_notes(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, beside: int
    ) -> tuple[str, ...]:
        """Return notes on the settings that SGLang's serve command cannot express."""
        slots = any(layer.kind == "state" for layer in architecture.cache_layers)
        return sglang_serve.notes(chosen.flags, slots)

    def tiers(self, hosted: HostInputs) -> tuple[KVTier, ...]:
        """Return the tiers of HiCache (SGLang's KV offloading) in host memory and on disk."""
        architecture, flags = hosted.architecture, hosted.chosen.flags
        if not flags.enable_hierarchical_cache:
            return ()
        attention = tuple(layer for layer in architecture.cache_layers if layer.kind != "state")
        kept, ranks = replace(architecture, cache_layers=attention), flags.tensor_parallel_size
        full, sliding = token_bytes(kept, flags.kv_cache_dtype, ranks)
        return sglang_tier.tiers(hosted, full, sliding, states.slot_bytes(architecture, ranks))

    def serve_lines(self, plan: Plan) -> tuple[str, ...]:
        """Return the ``sglang.launch_server`` command of ``plan``."""
        return (sglang_serve.serve_line(plan),)

    def log_mismatch(self, flags: Deployment, kind: str, quantization: str | None) -> str | None:
        """Return a text if the start-up log names another quantization than the plan's weights, else None."""
        if quantization in (None, flags.quantization):
            return None
        return f"the log's are {quantization}, the config says nothing of it"


def _device(memory: int) -> tuple[int, int, int, int]:
    return next(row for row in _DEVICES if memory < row[0] * GiB)


def _prefill_graphs(architecture: Architecture, flags: Deployment, tokens: int) -> int:
    """Return the MiB that SGLang reserves for CUDA graphs of prefills (reserve_for_graph_mb).

    Returns 0 where no prefill graphs are captured (apply_cuda_graph_compatibility in
    arg_groups/cuda_graph_hook.py).
    """
    kimi = any(state.name == "conv_q" for layer in architecture.cache_layers for state in layer.states)
    if flags.pipeline_parallel_size > 1 or kimi or has_towers(architecture):
        return 0
    if any(layer.kind == "mla" for layer in architecture.cache_layers):
        return 1536
    return 8 * sum(len(range(first, min(last, tokens + 1), step)) for first, last, step in _CAPTURED)


def token_bytes(architecture: Architecture, kv_dtype: str, ranks: int) -> tuple[int, int]:
    """Return the KV cache bytes per token on one rank, as (full-attention layers, sliding-window layers).

    Raises:
        UnsupportedArchitecture: a layer has neither full attention, MLA nor a sliding window.
    """
    full = sliding = 0
    # If any layer has a sparse indexer, every layer stores an indexer key (NSATokenToKVPool in
    # mem_cache/memory_pool.py).
    index = max((layer.index_size for layer in architecture.cache_layers), default=0)
    for layer in architecture.cache_layers:
        if layer.shares is not None:
            continue
        if layer.kind not in ("full", "mla", "sliding") or layer.compression > 1:
            raise UnsupportedArchitecture(
                f"the planner does not know SGLang's pool for {layer.kind} layers", field="layer_types"
            )
        size = _layer_bytes(layer, kv_dtype, ranks, index)
        if layer.kind == "sliding":
            sliding += size
        else:
            full += size
    return full, sliding


def _layer_bytes(layer: CacheLayer, kv_dtype: str, ranks: int, index: int) -> int:
    """Return the KV cache bytes per token of one layer on one rank.

    ``index`` is the number of elements of a sparse indexer's key, or 0 for a model without an indexer.
    """
    size = KV_DTYPE_BYTES[kv_dtype]
    if layer.kind == "mla" and index:
        # The indexer's key is fp8 with one fp32 scale per 128 elements. An 8-bit latent takes the 656 bytes per
        # token of FlashMLA's format (calculate_mla_kv_cache_dim). On SM10x, the trtllm backend stores 576 bytes
        # per token instead.
        row = _SPARSE_ROW if size == 1 else layer.head_size * size
        return row + index + 4 * (index // 128)
    if layer.kind == "mla":
        return layer.head_size * size
    value = layer.head_size if layer.value_head_size is None else layer.value_head_size
    return heads_per_rank(layer.kv_heads, ranks) * (layer.head_size + value) * size


ENGINE = SGLang()
