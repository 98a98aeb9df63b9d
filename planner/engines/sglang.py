"""SGLang's token pools: one slot per token, full and sliding layers in pools of their own sizes.

Source: sglang/srt/mem_cache/memory_pool.py and model_executor/model_runner.py (0.5): SWAKVPool splits the
memory between ``full`` tokens and ``full x swa_full_tokens_ratio`` tokens; max_total_num_tokens is the full
pool's. "GB" in its log is GiB. Checked against the logs in tests/data/field_reports.jsonl.
"""

from __future__ import annotations

import re
import shlex
from typing import ClassVar

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
from tonnage.planner.engines.tensors import merged_tensors
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.model.dtypes import KV_DTYPE_BYTES
from tonnage.planner.model.requests import RequestLaw
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.plans import Deployment, Plan, Resolved
from tonnage.planner.records import replace
from tonnage.planner.units import GiB, ceil_div

_LOG_LINES = (
    ("weights_bytes", GiB, rf"Load weight end\..*mem usage={NUMBER}GB"),
    ("tokens", 1, rf"max_total_num_tokens={NUMBER}"),
    ("max_model_len", 1, rf"context_len={NUMBER}"),
    ("kv_pool_bytes", GiB, rf"SWAKVPool mem usage: {NUMBER}GB"),
    ("cuda_graph_bytes", GiB, rf"Capture (?!draft)\w* graph end\..*?mem usage={NUMBER}GB"),
    ("free_bytes", GiB, rf"Load weight begin\. avail mem={NUMBER}GB"),
    ("free_after_pool_bytes", GiB, rf"Memory pool end\. avail mem={NUMBER}GB"),
)
# "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 148717, K size: 10.21 GB, V size: 10.21 GB"; of latent
# attention "KV size: 9.10 GB"; up to 0.4 without tokens
_LOG_POOL = (
    rf"KV Cache is allocated\.(?:.*?#tokens: (\d[\d,]*),)?.*?KV? size: {NUMBER}GB(?:, V size: {NUMBER}GB)?"
)
_LOG_STATES = rf"Mamba Cache is allocated\..*?conv_state size: {NUMBER}GB.*?ssm_state size: {NUMBER}GB"
_LOG_WINDOWS = rf"swa size: {NUMBER}, full size: {NUMBER}"
_LOG_FORMAT = r"Load weight end\..*quant=(\w+)"
# 0.5.23, where the pool is mapped once the graphs are captured; its "VA upper bound" before that is no memory
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
_SPARSE_ROW = 656  # 512 fp8 values, 4 fp32 scales, 64 bf16 rotary values
_MEM_FRACTION = 0.88  # mem_fraction_static on one GPU (server_args.py, 0.4)


class SGLang(Engine):
    name = "sglang"
    title = "SGLang"
    newest = (0, 5, 0)
    oldest = (0, 4, 0)  # mem_fraction_static was read in it
    # max_running_requests and chunked_prefill_size of its server (server_args.py 0.5)
    batch: ClassVar = {"cpu": (256, 2048), "cuda": (256, 2048)}
    blocks: ClassVar = {"cpu": 1, "cuda": 1}  # page_size 1
    fp8_kv_cache = True
    logs = True
    log_figures: ClassVar = {"weights_bytes": "", "kv_pool_bytes": "", "tokens": "", "cuda_graph_bytes": ""}

    def memory_limit(self, flags: Deployment, memory: int, share: float) -> int:
        return memory

    def static_share(self, flags: Deployment) -> float | None:
        return _MEM_FRACTION if flags.mem_fraction_static is None else flags.mem_fraction_static

    def tensors(self, architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
        return merged_tensors(architecture)

    def decoder_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        flags = chosen.flags
        full, sliding = token_bytes(architecture, flags.kv_cache_dtype, flags.tensor_parallel_size)
        size = int(full + flags.swa_full_tokens_ratio * sliding) if full and sliding else full or sliding
        # its --page-size: max_total_num_tokens is rounded down to whole pages (model_runner.py)
        element = KV_DTYPE_BYTES[flags.kv_cache_dtype]
        return token_pool(architecture, size, flags.kv_cache_dtype, element, chosen.block_size)

    def block_bounds(
        self, chosen: Resolved, pool: PoolSpec, size: int, fixed: tuple[int, int], weights: tuple[int, int],
        framework: int,
    ) -> tuple[int, int]:  # fmt: skip
        """The share is of what was free before the load, so that what the framework holds comes off it."""
        low, high = super().block_bounds(chosen, pool, size, fixed, weights, framework)
        given = chosen.flags.kv_cache_memory_bytes is not None
        return (low if given else max(0, low - ceil_div(framework, size))), high

    def free_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """mem_fraction_static of the device is for weights and pool."""
        share = chosen.flags.mem_fraction_static
        assert share is not None  # completed by static_share
        return max(0, int(chosen.device_memory * share) - weights) // size

    def read_log_line(self, line: str, out: LogFigures) -> None:
        text = squeezed(line)
        read_figures(self.name, _LOG_LINES, text, out)
        if "Memorypoolend" in text:
            out.state.add("pools are complete")  # what follows is a draft's
        if match := compiled(_LOG_POOL).search(text):
            out.engine = self.name
            if "pools are complete" not in out.state:
                out.pools += (number(match[2]) + number(match[3] or "0")) * GiB
                if match[1]:  # of sliding and full layers one after the other: the full pool is the longer one
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
            out.flags |= {_LOG_NAMES.get(key, key): value for key, value in given.items() if value != "None"}
            out.model = out.flags.get("model") or out.model
            out.engine = out.engine or self.name
        if match := compiled(_LOG_WINDOWS).search(text):
            out.flags["swa_full_tokens_ratio"] = str(number(match[1]) / max(1.0, number(match[2])))
        if (match := compiled(_LOG_FORMAT).search(text)) and match[1] != "None":
            out.flags["quantization"] = match[1]

    def log_rank(self, line: str) -> tuple[str, str]:
        match = re.search(_LOG_RANK, line)
        parts = match[1].split() if match else []
        return "_".join(part for part in parts if not part.startswith(("EP", "ATTN"))), ""

    def settle_log(self, out: LogFigures) -> None:
        """Tokens that its scheduler did not print are those of the longest pool."""
        if out.engine == self.name and out.cells:
            out.figures.setdefault("tokens", out.cells)
            out.cells = 0.0

    def log_says_ready(self, line: str) -> bool:
        return _LOG_READY in line

    def capacity(self, pool: PoolSpec, chosen: Resolved, num_blocks: int) -> PoolCapacity:
        """Its max_total_num_tokens: every slot of every page."""
        held = super().capacity(pool, chosen, num_blocks)
        return replace(held, tokens=num_blocks * chosen.block_size)

    def request_law(self, architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
        if any(layer.kind == "sliding" for layer in architecture.cache_layers):
            raise UnsupportedArchitecture(
                "what a request takes of SGLang's pool of sliding layers is not known", field="sliding_window"
            )
        return super().request_law(architecture, chosen, pool)

    def serve_lines(self, plan: Plan) -> tuple[str, ...]:
        flags = plan.deployment
        line = ["python", "-m", "sglang.launch_server", "--model-path", plan.model.id, "--context-length",
                str(flags.max_model_len), "--tp-size", str(flags.tensor_parallel_size)]  # fmt: skip
        if plan.kv_cache.layout.block_size > 1:
            line += ["--page-size", str(plan.kv_cache.layout.block_size)]
        return (shlex.join(line),)

    def unlike_logged(self, flags: Deployment, kind: str, quantization: str | None) -> str | None:
        if quantization in (None, flags.quantization):
            return None
        return f"the log's are {quantization}, the config says nothing of it"


def token_bytes(architecture: Architecture, kv_dtype: str, ranks: int) -> tuple[int, int]:
    """(full, sliding) bytes per token on one rank. Raises UnsupportedArchitecture for other caches."""
    full = sliding = 0
    # every layer of such a model has room for an indexer's key (mem_cache/memory_pool.py NSATokenToKVPool)
    index = max((layer.index_size for layer in architecture.cache_layers), default=0)
    for layer in architecture.cache_layers:
        if layer.shares is not None:
            continue
        if layer.kind not in ("full", "mla", "sliding") or layer.compression > 1:
            raise UnsupportedArchitecture(
                f"{layer.kind} layers in SGLang's pools are not known here", field="layer_types"
            )
        size = _layer_bytes(layer, kv_dtype, ranks, index)
        if layer.kind == "sliding":
            sliding += size
        else:
            full += size
    return full, sliding


def _layer_bytes(layer: CacheLayer, kv_dtype: str, ranks: int, index: int) -> int:
    """``index``: elements of an indexer's key, 0 without one."""
    size = KV_DTYPE_BYTES[kv_dtype]
    if layer.kind == "mla" and index:
        # fp8 with an fp32 scale for 128 elements; beside it the latent, in 8 bits in FlashMLA's rows
        # (calculate_mla_kv_cache_dim; SM10x with the trtllm backend has plain ones of 576)
        row = _SPARSE_ROW if size == 1 else layer.head_size * size
        return row + index + 4 * (index // 128)
    if layer.kind == "mla":
        return layer.head_size * size
    value = layer.head_size if layer.value_head_size is None else layer.value_head_size
    return heads_per_rank(layer.kv_heads, ranks) * (layer.head_size + value) * size


ENGINE = SGLang()
