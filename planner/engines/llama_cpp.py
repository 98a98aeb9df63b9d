"""llama.cpp: flag defaults and its KV cache of ``n_ctx`` cells per layer, with separate types for K and V.

A cell stores one token. The source is src/llama-kv-cache.cpp (llama.cpp, 2025) and the start-up logs in
tests/data/field_reports.jsonl.

- Cells are rounded up to a multiple of 256 per sequence (GGML_PAD, the block of flash attention).
- A sliding-window cache (llama-kv-cache-iswa.cpp) has window x sequences + ubatch cells, rounded up.
- With ``full_sliding`` (older releases and ik_llama.cpp), sliding-window layers keep every cell.
- With MLA attention, MLA models (deepseek2) store the latent as K and no V. Without it, they store K and V
  expanded for every head. In both cases one rank holds the whole cache.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.log import NUMBER, LogFigures, compiled, number, read_figures, squeezed
from tonnage.planner.engines.pool import PoolSpec, expanded_heads, token_pool
from tonnage.planner.engines.runtime import llama_cpp
from tonnage.planner.engines.runtime.estimate import NOTHING, Coefficients, Estimate, Runtime
from tonnage.planner.engines.runtime.host import HostInputs
from tonnage.planner.engines.version import Version
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.flags import flags_of
from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.model.host import HostMemory, HostPart
from tonnage.planner.model.requests import GroupLaw, RequestLaw
from tonnage.planner.model.tensor import HeaderTensor, TensorSpec
from tonnage.planner.plans import Plan, RankPlan, Resolved
from tonnage.planner.quantization.kv_cache import StoredCache
from tonnage.planner.units import GiB, MiB, ceil_div

# Name of a ggml type -> (values per quantization block, bytes per block), from ggml-common.h.
CACHE_TYPES = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
_TORCH = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_LOG_LINES = (
    ("weights_bytes", GiB, rf"(?:model|file) size={NUMBER}GiB"),
    ("weights_bytes", MiB, rf"(?:model|file) size={NUMBER}MiB"),
    ("context_tokens", 1, rf"n_ctx={NUMBER}"),
)
# Current releases of llama.cpp log "size = 640.00 MiB ( 16384 cells,  5 layers,  2/2 seqs), K (f16): 320.00
# MiB, V (f16): 320.00 MiB". There, "2/2 seqs" is sequences / streams, and each stream has the given number of
# cells. ik_llama.cpp and older releases log "KV self size  = 135.00 MiB, K (f16):   81.00 MiB, V (f16):
# 54.00 MiB".
_LOG_POOL = rf"(?:(?:llama_kv_cache\w*|llama_memory_recurrent): size|KV self size)={NUMBER}MiB"
_LOG_UBATCH = r"n_ubatch=(\d+)"
_LOG_FLASH = r"flash_attn=(\w+)"
_FLASH = {"0": "off", "1": "on", "disabled": "off", "enabled": "on", "auto": "auto"}
_LOG_FILE = r"llama_model_loader: loaded meta data .* from (\S+\.gguf)"
_LOG_CELLS = r"\((\d+) cells,\d+ layers,(?:(\d+)/)?(\d+) seqs\)"
_LOG_TYPES = r"(?:K|c\^KV)\((\w+)\)(?:.*?V\((\w+)\))?"
# llama.cpp's log lists buffers by device: "CUDA0 model buffer size = 4403.50 MiB", "CUDA0 compute buffer size =
# 560 MiB".
_LOG_BUFFER = rf"(\w+?)(model|KV|RS|compute|output) buffer size={NUMBER}MiB"
# llama.cpp's memory breakdown (tools/ and common/, 2026) prints MiB as total = free + (used = model + context +
# compute) + unaccounted: "|   - CUDA0 (RTX 3090) | 24135 = 17406 + (6187 = 4403 +   512 +  1272) +     541 |".
_LOG_BREAKDOWN = r"\|-(\w+).*?\|(\d+)=(\d+)\+\((\d+)=(\d+)\+(\d+)\+(\d+)\)\+"
_LOG_ENGINE = r"llama_(?:model_loader|context|new_context_with_model|kv_cache|init_from_model|model_load)\w*:"
_LOG_READY = ("server is listening on", "main: model loaded", "HTTP server listening")
# Tensors of the input layer, which stays on the host (LLM_TENSOR_LAYER_INPUT in src/llama-arch.cpp).
_INPUTS = (
    "token_embd.weight", "token_embd_norm.weight", "token_embd_norm.bias", "token_types.weight",
    "position_embd.weight", "per_layer_token_embd.weight",
)  # fmt: skip
_BLOCK = re.compile(r"(?:blk|model\.layers)\.(\d+)\.")
CELL_PADDING = 256
MAMBA_STATE_BYTES = 4  # llama.cpp keeps recurrent states in f32 (llama-memory-recurrent.cpp)

MlaMode = Literal["expanded", "latent", "latent+transposed"]


class LlamaCpp(Engine):
    """llama.cpp's server, whose KV cache is sized by the requested context instead of by free memory."""

    name = "llama.cpp"
    title = "llama.cpp"
    # The defaults are n_parallel 1 and n_ubatch 512 (common/common.h, 2025).
    batch: ClassVar = {"cpu": (1, 512), "cuda": (1, 512)}
    blocks: ClassVar = {"cpu": 1, "cuda": 1}  # llama.cpp has no blocks: its cells of one token count as blocks
    logs = True
    log_figures: ClassVar = {
        "weights_bytes": "", "activation_bytes": "", "kv_pool_bytes": "", "context_tokens": "",
    }  # fmt: skip
    sized_by_context = True
    keeps_gguf = True

    def memory_limit(self, flags: Deployment, memory: int, share: float) -> int:
        """Return the whole device memory in bytes, because llama.cpp leaves no share of it unused."""
        return memory

    def choose_kv_dtype(
        self, flags: Deployment, dtype: str, architecture: Architecture, version: Version,
        stored: StoredCache | None,
    ) -> str:  # fmt: skip
        """Return the KV cache types of K and V in llama.cpp's names, such as f16 or q8_0/f16.

        Raises:
            DeploymentError: a type is unknown, or V is quantized without flash attention.
        """
        found = check_cache_types(flags.kv_cache_dtype)
        if flags.flash_attn == "off" and CACHE_TYPES[cache_types(found)[1]][0] > 1:
            raise DeploymentError(
                f"{found} quantizes V, which llama.cpp refuses without flash attention ('V cache quantization "
                "requires flash_attn')",
                field="--flash-attn", hint="set it to on, or use --kv-cache-dtype f16",
            )  # fmt: skip
        return found

    def block_size(self, asked: int | None, flags: Deployment, architecture: Architecture) -> int:
        """Return 1, the tokens per block, because a cache cell holds one token.

        Raises:
            DeploymentError: another block size was requested.
        """
        if asked not in (None, 1):
            raise DeploymentError(
                "llama.cpp has no block size: a cache cell holds one token",
                field="--block-size",
                hint="leave out --block-size",
            )
        return 1

    def check_length(self, asked: int, architecture: Architecture) -> None:
        """Accept every context length, because llama.cpp only warns about long ones (``length_notes``)."""

    def length_notes(self, asked: int, architecture: Architecture) -> tuple[str, ...]:
        """Return a note on a context above the model's own maximum.

        llama-context.cpp prints "n_ctx_seq (%u) > n_ctx_train (%u) -- possible training context overflow".
        """
        own = architecture.max_model_len
        if asked <= own:
            return ()
        return (
            f"{asked:,} tokens are above the model's own {own:,} ({architecture.position_field}): llama.cpp "
            "warns of it and starts; answers behind them may be worthless without a rope scaling",
        )

    def adjust_step(
        self, flags: Deployment, architecture: Architecture, max_model_len: int, tokens: int
    ) -> tuple[Deployment, int]:
        """Return the plan's flags and the maximum tokens of a step, adjusted for encoder models.

        Raises:
            DeploymentError: --n-gpu-layers is set for a CPU or for several GPUs, or a step of an encoder model
                is shorter than its longest text.
        """
        if flags.n_gpu_layers is not None and flags.device == "cpu":
            raise DeploymentError(
                "there is no GPU to place layers on, because the plan is for a CPU",
                field="--n-gpu-layers", hint="leave out --n-gpu-layers, or name a GPU with --gpu",
            )  # fmt: skip
        if flags.n_gpu_layers is not None and flags.tensor_parallel_size * flags.pipeline_parallel_size > 1:
            raise DeploymentError(
                "the planner supports this option for a single GPU only", field="--n-gpu-layers",
                hint="leave out --n-gpu-layers, or plan without tensor and pipeline parallelism",
            )  # fmt: skip
        return super().adjust_step(flags, architecture, max_model_len, tokens)

    def tensors(self, architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
        """Return the model's tensors that lie in device memory.

        There are no rotary tables, because llama.cpp computes rotary embeddings in each step. With GPUs, the
        token embedding stays on the host (dev_input in src/llama-model.cpp). An output head tied to the
        embedding then becomes a separate copy on the GPU.
        """
        held = [tensor for tensor in architecture.tensors if tensor.role != "buffer"]
        if flags.device != "cpu":
            held = [replace(t, tied_to=None) if t.role == "head" else t for t in held if t.role != "embedding"]
            first = first_block(architecture.layers, flags)
            held = [t for t in held if t.layer is None or t.layer >= first]
        return tuple(held)

    def stored_tensors(self, tensors: tuple[HeaderTensor, ...], flags: Deployment) -> tuple[HeaderTensor, ...]:
        """Return the GGUF file's tensors in device memory; with GPUs, the input layer stays in host memory."""
        if flags.device == "cpu":
            return tensors
        kept = () if any(t.name == "output.weight" for t in tensors) else ("token_embd.weight",)
        blocks = {t.name: int(match[1]) for t in tensors if (match := _BLOCK.match(t.name))}
        first = first_block(max(blocks.values(), default=-1) + 1, flags)
        return tuple(
            t
            for t in tensors
            if (t.name in kept or t.name not in _INPUTS) and blocks.get(t.name, first) >= first
        )

    def decoder_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """Return the pool of KV cache cells for a model that generates tokens."""
        architecture, _ = split_blocks(architecture, chosen.flags)
        size = ceil_div(_cache_bytes(architecture, chosen), _context(chosen))
        return token_pool(architecture, size, chosen.flags.kv_cache_dtype, 2)

    def request_law(self, architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
        """Return the rule for the number of KV cache cells that a request takes.

        By default each sequence has a slot as long as the context. In a unified cache, a request takes one cell
        per token.
        """
        slot = GroupLaw("fixed", 1, blocks=chosen.max_model_len)
        if chosen.flags.kv_unified:
            slot = GroupLaw("all", 1)
        return RequestLaw(
            (slot,), pool.layout.bytes_per_block, chosen.max_num_batched_tokens, 1, 1, "llama.cpp's slots"
        )

    def cpu_framework(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """Estimate the memory of llama-server on a CPU, without the model, KV cache and compute buffer."""
        return llama_cpp.process(architecture, chosen, _partial(architecture, chosen))

    def cpu_activation(self, architecture: Architecture, chosen: Resolved) -> Estimate:
        """Estimate the compute buffer (activations of one step) on a CPU, as llama-fit-params reports it."""
        if architecture.kind != "decoder":
            return super().cpu_activation(architecture, chosen)

        return llama_cpp.compute_buffer(architecture, chosen, *_masked(architecture, chosen))

    def gpu_terms(
        self, architecture: Architecture, chosen: Resolved, fitted: Coefficients | None = None
    ) -> Runtime:
        """Return the estimated bytes of driver context and compute buffer on a GPU, and 0 for CUDA graphs."""
        return Runtime(llama_cpp.context_memory(chosen), self.cpu_activation(architecture, chosen), NOTHING)

    def free_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of KV cache cells that the requested context needs, regardless of free memory."""
        return _context(chosen)

    def host_memory(self, hosted: HostInputs) -> HostMemory:
        """Return the host memory of llama-server on GPUs."""
        architecture, chosen = hosted.architecture, hosted.chosen
        found = llama_cpp.host_memory(hosted, _partial(architecture, chosen), _masked(architecture, chosen)[0])
        _, left = split_blocks(architecture, chosen.flags)
        if not left.cache_layers:
            return found
        size = _cache_bytes(left, chosen)
        part = HostPart(
            "KV cache of blocks on the host", size, size, size,
            f"{first_block(architecture.layers, chosen.flags)} blocks",
            "--n-gpu-layers; src/llama-kv-cache.cpp",
        )  # fmt: skip
        return replace(found, parts=(*found.parts, part))

    def start_notes(
        self, architecture: Architecture, chosen: Resolved, rank: RankPlan, beside: int
    ) -> tuple[str, ...]:
        """Return a note on the transformer blocks that --n-gpu-layers leaves on the host."""
        first, asked = first_block(architecture.layers, chosen.flags), chosen.flags.n_gpu_layers
        if not first:
            return ()
        return (
            f"-ngl {asked} of {architecture.layers + 1}: the output layer and blocks {first} to "
            f"{architecture.layers - 1} are on the GPU; blocks 0 to {first - 1} are computed on the CPU, and "
            "their weights have to stay in the page cache",
        )

    def read_log_line(self, line: str, out: LogFigures) -> None:
        """Read buffers, cache cells, cache types and flags from one start-up log line into ``out``."""
        text = squeezed(line)
        if not (
            compiled(_LOG_ENGINE).search(text) or "size=" in text or "memorybreakdown" in text or "|-" in text
        ):
            return
        read_figures(self.name, _LOG_LINES, text, out)
        if match := compiled(_LOG_POOL).search(text):
            out.engine, out.pools = self.name, out.pools + number(match[1]) * MiB
            if cells := compiled(_LOG_CELLS).search(text):  # n_ctx counts the KV cache cells of all streams
                shared = cells[2] not in (None, cells[3])
                out.cells = max(out.cells, number(cells[1]))
                out.flags["max_num_seqs"], out.flags["kv_unified"] = cells[2 if shared else 3], str(shared)
            if types := compiled(_LOG_TYPES).search(text):
                out.flags["kv_cache_dtype"] = "/".join(kind for kind in types.groups() if kind)
        if match := compiled(_LOG_UBATCH).search(text):
            out.flags["max_num_batched_tokens"] = match[1]
        if match := compiled(_LOG_FLASH).search(text):
            out.flags["flash_attn"] = _FLASH.get(match[1], "auto")
        if match := re.search(_LOG_FILE, line):
            out.model = match[1]
        _read_devices(text, out)

    def finish_log(self, out: LogFigures) -> None:
        """Derive the maximum length and the totals of weights and compute buffers from the log's figures.

        In a log that does not print the number of KV cache cells, the maximum length is the context of one
        sequence. If the log lists buffers on GPUs, the totals exclude buffers in host memory.
        """
        if out.engine != self.name:
            return
        if "context_tokens" in out.figures:
            out.figures.setdefault("max_model_len", out.figures["context_tokens"])
        for term, kind, total in (("weights_bytes", "model", sum), ("activation_bytes", "compute", max)):
            held = {n: size for n, size in out.figures.items() if n.endswith(f"_{kind}_bytes")}
            gpus = [size for n, size in held.items() if not n.startswith("CPU") and "Host" not in n]
            if gpus or (held and term not in out.figures):
                out.figures[term] = total(gpus or held.values())
                out.rounding[term] = MiB / 200 * max(1, len(gpus))  # llama.cpp prints each buffer to 0.01 MiB

    def log_is_ready(self, line: str) -> bool:
        """Return whether a line of llama.cpp's log reports that the server listens for requests."""
        return any(mark in line for mark in _LOG_READY)

    def serve_lines(self, plan: Plan) -> tuple[str, ...]:
        """Return the ``llama-server`` command of ``plan``."""
        flags = plan.deployment
        k, v = cache_types(flags.kv_cache_dtype)
        # The option -c is n_ctx, the number of cells of all sequences together.
        shared = plan.kv_cache.layout.block_size * plan.kv_cache.num_blocks
        from_hub = plan.model.path == plan.model.id and not plan.model.id.lower().endswith(".gguf")
        named = ["-hf", plan.model.id] if from_hub and ":" in plan.model.id else ["-m", plan.model.path]
        line = ["llama-server", *named, "-c", str(shared), "-np", str(flags.max_num_seqs)]
        if "max_num_batched_tokens" not in plan.defaults:
            line += ["-ub", str(flags.max_num_batched_tokens)]
        if "kv_cache_dtype" not in plan.defaults:
            line += ["-ctk", k, "-ctv", v]
        if flags.flash_attn != "auto":
            line += ["-fa", flags.flash_attn]
        if flags.n_gpu_layers is not None:
            line += ["-ngl", str(flags.n_gpu_layers)]
        if flags.kv_unified:
            line.append("-kvu")
        if flags.cache_ram_bytes != flags_of(Deployment)["cache_ram_bytes"].default:
            line += ["--cache-ram", str(flags.cache_ram_bytes // MiB)]
        return (shlex.join(line),)

    def log_mismatch(self, flags: Deployment, kind: str, quantization: str | None) -> str | None:
        """Return why the planned weights cannot be those of a llama.cpp log, or None for a GGUF file.

        A llama.cpp log is always of a GGUF file. If the plan is for a model given by its config, its weights
        cannot be compared with the log.
        """
        if kind == "gguf":
            return None
        return "the log is of a GGUF file, --model names a config (give the .gguf)"


def first_block(layers: int, flags: Deployment) -> int:
    """Return the index of the first transformer block that llama.cpp places on the GPU, 0 if all are there.

    --n-gpu-layers N places the output layer and the last N - 1 transformer blocks on the GPU (i_gpu_start in
    src/llama-model.cpp, read 2026-11). Older releases place the last N blocks, and then the output layer.
    """
    return 0 if flags.n_gpu_layers is None else max(0, layers + 1 - flags.n_gpu_layers)


def split_blocks(architecture: Architecture, flags: Deployment) -> tuple[Architecture, Architecture]:
    """Return two copies of the model, with the KV caches of the layers on the GPU and of those on the host."""
    first = first_block(architecture.layers, flags)
    here = tuple(layer for layer in architecture.cache_layers if layer.layer >= first)
    there = tuple(layer for layer in architecture.cache_layers if layer.layer < first)
    return replace(architecture, cache_layers=here), replace(architecture, cache_layers=there)


def _read_devices(text: str, out: LogFigures) -> None:
    """Read the buffer sizes of each device from one start-up log line into ``out``."""
    for device, what, size in compiled(_LOG_BUFFER).findall(text):
        out.figures[f"{device}_{what}_bytes"] = number(size) * MiB
    if match := compiled(_LOG_BREAKDOWN).search(text):
        for name, place in (("model", 5), ("KV", 6), ("compute", 7)):
            out.figures.setdefault(f"{match[1]}_{name}_bytes", number(match[place]) * MiB)


@dataclass(frozen=True, slots=True)
class Cache:
    """The bytes of a llama.cpp KV cache and the number of its cells.

    Attributes:
        cells: Cells of a full-attention layer, over all streams.
        k_bytes: Bytes of all K tensors.
        v_bytes: Bytes of all V tensors.
        state_bytes: Bytes of recurrent states.
    """

    cells: int
    k_bytes: int
    v_bytes: int
    state_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Return the total bytes of keys, values and recurrent states in the KV cache."""
        return self.k_bytes + self.v_bytes + self.state_bytes


def check_cache_types(text: str) -> str:
    """Return the KV cache types in llama.cpp's names: one type, or K and V as in ``q8_0/f16``.

    Names of torch dtypes are translated, and ``auto`` means f16.

    Raises:
        DeploymentError: a type is not one of CACHE_TYPES.
    """
    if text == "auto":
        return "f16"
    parts = [_TORCH.get(part, part) for part in text.split("/")]
    text = "/".join(parts)
    if len(parts) > 2 or not CACHE_TYPES.keys() >= {*parts}:
        raise DeploymentError(
            f"{text!r} is not a cache type", field="--kv-cache-dtype",
            hint="one of " + ", ".join(CACHE_TYPES) + ", or K/V as in q8_0/f16",
        )  # fmt: skip
    return text


def cache_types(text: str) -> tuple[str, str]:
    """Return the KV cache types (K, V) in ``text``: ``f16`` sets both, ``q8_0/f16`` sets them separately."""
    k, _, v = text.partition("/")
    return k, v or k


def row_bytes(elements: int, kind: str) -> int:
    """Return the bytes of a tensor row with ``elements`` values of the ggml type ``kind``.

    Raises:
        DeploymentError: the row is not a whole number of the type's quantization blocks.
    """
    values, size = CACHE_TYPES[kind]
    if elements % values:
        raise DeploymentError(
            f"{kind} quantizes {values} values at a time, which do not divide the {elements} values that a "
            "layer caches per token",
            field="--kv-cache-dtype", hint="use f16",
        )  # fmt: skip
    return elements // values * size


def size_cache(
    architecture: Architecture,
    context: int,
    types: str = "f16",
    *,
    sequences: int = 1,
    ubatch: int = 512,
    full_sliding: bool = False,
    unified: bool = True,
    mla: MlaMode = "latent",
) -> Cache:
    """Return the bytes and cells of llama.cpp's KV cache for ``context`` tokens.

    Args:
        architecture: The model.
        context: Cells that all sequences share (``unified``) or divide evenly.
        types: Cache types of K and V, such as ``f16`` or ``q8_0/f16``.
        sequences: Number of parallel sequences.
        ubatch: Tokens per micro-batch (n_ubatch).
        full_sliding: Whether sliding-window layers keep every cell, as in older releases.
        unified: Whether all sequences share one stream of cells.
        mla: What the cache of an MLA layer stores: the latent, the latent with a transposed copy, or expanded K
            and V.

    Raises:
        UnsupportedArchitecture: llama.cpp's cache layout for this model is not known.
    """
    k_type, v_type = cache_types(types)
    per_sequence = context if unified else ceil_div(context, sequences)
    streams = 1 if unified else sequences
    cells = _padded(per_sequence) if not full_sliding else per_sequence
    k = v = state = 0
    for layer in architecture.cache_layers:
        if layer.shares is not None:
            continue
        if layer.kind == "state":
            state += sequences * sum(prod(t.shape) * MAMBA_STATE_BYTES for t in layer.states)
            continue
        held = cells
        if layer.kind == "sliding" and not full_sliding:
            window = layer.window or 0
            held = min(cells, _padded(window * (sequences if unified else 1) + ubatch))
        rows = held * streams
        k_row, v_row = _rows(architecture, layer, mla)
        k += rows * row_bytes(k_row, k_type)
        v += rows * (row_bytes(v_row, v_type) if v_row else 0)
    return Cache(cells * streams, k, v, state)


def _cache_bytes(architecture: Architecture, chosen: Resolved) -> int:
    """Return the KV cache bytes of all sequences of the plan in the layers of ``architecture``."""
    return size_cache(
        architecture, _context(chosen), chosen.flags.kv_cache_dtype, sequences=chosen.max_num_seqs,
        ubatch=chosen.max_num_batched_tokens, unified=chosen.max_num_seqs == 1 or chosen.flags.kv_unified,
    ).bytes  # fmt: skip


def _partial(architecture: Architecture, chosen: Resolved) -> int:
    """Return the KV cache bytes of one sequence in sliding-window and recurrent layers, 0 without any.

    llama.cpp cannot roll such layers back to an earlier token, so its context checkpoints copy the cache of
    these layers.
    """
    kept = tuple(layer for layer in architecture.cache_layers if layer.kind in ("sliding", "state"))
    partial, types = replace(architecture, cache_layers=kept), chosen.flags.kv_cache_dtype
    return size_cache(partial, chosen.max_model_len, types, ubatch=chosen.max_num_batched_tokens).bytes


def _context(chosen: Resolved) -> int:
    """Return llama.cpp's n_ctx: the KV cache cells (one token each) of all sequences together."""
    return chosen.max_model_len * (1 if chosen.flags.kv_unified else chosen.max_num_seqs)


def _masked(architecture: Architecture, chosen: Resolved) -> tuple[int, int]:
    """Return the sum of the lengths of all attention masks, and the largest length, in KV cache cells.

    A step has one mask for full attention, and one for each size of sliding window. A cell stores one token.
    """
    cells = _padded(chosen.max_model_len)
    windows = {layer.window or 0 for layer in architecture.cache_layers if layer.kind == "sliding"}
    whole = any(layer.kind not in ("sliding", "state") for layer in architecture.cache_layers)
    shared = chosen.max_num_seqs if chosen.flags.kv_unified else 1
    held = [min(cells, _padded(window * shared + chosen.max_num_batched_tokens)) for window in windows]
    masks = [*([cells] if whole else []), *held]
    return sum(masks), max(masks, default=0)


def _padded(cells: int) -> int:
    return ceil_div(cells, CELL_PADDING) * CELL_PADDING


def _rows(architecture: Architecture, layer: CacheLayer, mla: MlaMode) -> tuple[int, int]:
    """Return the number of K values and of V values that a layer caches per token (per cell)."""
    if layer.kind in ("full", "sliding"):
        value = layer.head_size if layer.value_head_size is None else layer.value_head_size
        return layer.kv_heads * layer.head_size, layer.kv_heads * value
    if layer.kind == "mla":
        if mla == "latent":
            return layer.head_size, 0
        sizes = expanded_heads(architecture)
        # With -mla 1, the cache stores the MLA latent, and a transposed copy of the latent without its rotary
        # part.
        if mla == "latent+transposed":
            return layer.head_size, sizes.latent
        return architecture.heads * sizes.key, architecture.heads * sizes.value
    raise UnsupportedArchitecture(
        f"the planner does not know llama.cpp's cache for {layer.kind} layers", field="layer_types"
    )


ENGINE = LlamaCpp()
