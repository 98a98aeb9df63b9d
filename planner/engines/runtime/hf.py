"""Memory of the hf engine besides weights and KV pool: its processes, and the activations of one step."""

from __future__ import annotations

from tonnage.planner.engines.runtime import host
from tonnage.planner.engines.runtime.api import framework
from tonnage.planner.engines.runtime.estimate import Estimate
from tonnage.planner.engines.runtime.host import HostInputs
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES, HF_KV_DTYPE_BYTES
from tonnage.planner.model.host import HostMemory, HostPart
from tonnage.planner.plans import Resolved
from tonnage.planner.units import MiB

# Measured anonymous memory (RssAnon) of the hf engine's processes on a CPU. The load is that of
# benchmarks/memory_limit.py with a pool of 512 MiB. The system is Linux x86_64, Python 3.11, torch 2.13.0+cpu,
# transformers 5.19 and numba 0.65. The engine process has 321 MiB without weights and pool when ready, and at
# most 356 MiB under load. About 30 MiB of these are activations, and about 45 MiB are numba's compiler. The API
# process has 54 MiB with a vocabulary of 1,024 tokens, 67 MiB with SmolLM2's 49,152 and 149 MiB with Gemma's
# 262,144 (benchmarks/memory_terms.py). 64 clients add 3 MiB, 256 clients add 8 MiB. HF_INTERVAL also covers
# memory allocators other than glibc's.
API_PROCESS_BYTES = 66 * MiB
API_TOKEN_BYTES = 400
HF_CHILD_BYTES = 328 * MiB
HF_INTERVAL = (0.85, 1.25)

# Two copies of the logits are alive at once: the logits in the model's dtype and an fp32 copy. The hf engine's
# sampler adds a few copies for 16 rows at a time (server/engines/hf/sampling/draw.py).
# benchmarks/memory_terms.py checks the number of copies.
LOGITS_COPIES = 2
_LOW, _HIGH = 0.5, 2.0  # bounds of the activations, as factors of their estimate

# Tokens that the hf engine's reference attention gathers at a time for decodes. Contexts are padded to the
# longest of a batch. Without this limit, one long context would cost memory of its length for every sequence.
GATHERED_TOKENS = 16384

# Temporary bytes of one LLM.int8 layer (bitsandbytes 0.50.2): per input value while the input is quantized, and
# per input and output value while the int32 product is scaled. Below, bytes per value are in brackets.
#
# On a CPU (backends/default/ops.py), the input is quantized from a float16 copy (2), with a mask of the
# outliers (1) and float32 values before and after rounding (4 + 4). The product is scaled in float32. Its int32
# values (4), their float32 copy (4), the product of both scales (4) and the result (4) exist at once, beside
# the int8 input (1). torch's profiler measured 11.0 bytes per input value during quantization, and 1 byte per
# input value plus 16.0 bytes per output value during scaling. With outliers in every column it measured up to
# 40 % more (512 tokens, layers of 576 x 1,536 and 1,536 x 576).
#
# On a GPU (backends/cuda/ops.py), kernels need no float32 values to quantize the input: a float16 copy (2), the
# quantized input (1), absolute values (2) and the mask (1) exist at once. While the product is scaled, its
# int32 values (4), a float16 result (2) and the result in the model's dtype (at most 4) exist.
_INT8_QUANTIZED = {"cpu": 11, "cuda": 6}
_INT8_SCALED = {"cpu": (1, 16), "cuda": (1, 10)}
# Bytes per value of the input's copy, the weight's copy and the product, which a CPU without AVX-512 holds in
# float32 while it multiplies.
_INT8_FLOAT32 = 4

# FlashInfer's workspace for partial results: 128 MiB, as in its documentation and in vLLM's attention backend
# (flashinfer/prefill.py; vllm/v1/attention/backends/flashinfer.py).
FLASHINFER_WORKSPACE_BYTES = 128 * MiB
# Number of queries in one FlexAttention tile. A sequence's last tile is padded to this number
# (server/engines/hf/attention/flex.py).
FLEX_TILE = 16


def api_bytes(vocab_size: int) -> int:
    """Return the memory of the hf engine's API process in bytes, while no large requests are in flight."""
    return API_PROCESS_BYTES + vocab_size * API_TOKEN_BYTES


def framework_bytes(vocab_size: int) -> Estimate:
    """Estimate the hf engine's memory without weights and KV pool, with client buffers and grammars."""
    return framework(
        api_bytes(vocab_size) + HF_CHILD_BYTES,
        vocab_size,
        HF_INTERVAL,
        f"API process {API_PROCESS_BYTES:,} + {API_TOKEN_BYTES} each + engine process {HF_CHILD_BYTES:,}",
        "RssAnon after imports, torch 2.13 cpu, llguidance 1.7",
    )


# Number of threads with which transformers reads weights (GLOBAL_WORKERS in core_model_loading.py, 5.19).
_READERS = 4


def host_memory(hosted: HostInputs) -> HostMemory:
    """Return the hf engine's host memory on GPUs: its processes, CUDA, and the buffers for reading weights."""
    held = framework_bytes(hosted.architecture.vocab_size)
    processes = HostPart("processes", held.value, held.low, held.high, held.formula, held.source)
    parts = (processes, host.cuda(len(hosted.ranks)), *host.reading(hosted, _READERS))
    return HostMemory(parts, host.page_cache(hosted))


def activation_bytes(architecture: Architecture, chosen: Resolved) -> Estimate:
    """Estimate the peak memory, without weights and KV pool, of a step of ``max_num_batched_tokens`` tokens.

    The peak is the sum of the residual stream, the logits of ``max_num_seqs`` sequences, and one layer's
    tensors: those of attention or of the MLP, whichever are larger. A layer's tensors and the logits are not
    alive together. They are added because allocators seldom free a layer's memory before the logits exist.
    """
    tokens = chosen.max_num_batched_tokens
    seqs = chosen.max_num_seqs
    size = DTYPE_BYTES[chosen.flags.dtype]
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    q = architecture.heads * architecture.head_size
    kv = architecture.kv_heads * architecture.head_size
    # Attention holds q, k, v, rotated copies of q and k, and the output. The MLP holds gate, up and their
    # product; an MLP without a gate holds its intermediate values twice.
    attention = tokens * (3 * q + 3 * kv) * size
    mlp = tokens * inner * (3 if architecture.gated_mlp else 2) * size
    residual = 2 * tokens * hidden * size
    logits = seqs * architecture.vocab_size * 4 * LOGITS_COPIES
    gathered = _kernel_bytes(architecture, chosen)
    # An encoder returns embeddings from its hidden states, so it has neither logits nor a KV pool.
    if architecture.kind == "encoder":
        logits = gathered = 0
    quantized = _int8_bytes(architecture, chosen)
    value = max(attention + gathered, mlp) + residual + logits + quantized
    formula = (
        f"max(attention {attention + gathered:,}, MLP {mlp:,}) + residual {residual:,} for {tokens:,} tokens "
        f"+ logits {seqs:,} x {architecture.vocab_size:,} x 4 x {LOGITS_COPIES} = {logits:,}"
    )
    if quantized:
        formula += f" + temporary values of LLM.int8 {quantized:,}"
    source = "max_num_batched_tokens, max_num_seqs, vocab_size"
    return Estimate(value, int(value * _LOW), int(value * _HIGH), formula, source)


def _int8_bytes(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of temporary tensors in the largest LLM.int8 layer, 0 without --quantization int8."""
    flags, tokens = chosen.flags, chosen.max_num_batched_tokens
    if flags.quantization != "int8":
        return 0
    of_input, (kept, of_output) = _INT8_QUANTIZED[flags.device], _INT8_SCALED[flags.device]
    largest = 0
    for tensor in architecture.tensors:
        if tensor.role == "head" or len(tensor.shape) != 2 or tensor.module_class not in ("Linear", "Conv1D"):
            continue
        out, into = tensor.shape if tensor.module_class == "Linear" else tensor.shape[::-1]
        steps = [tokens * into * of_input, tokens * (into * kept + out * of_output)]
        if flags.device == "cpu":
            multiplied = tokens * into + _INT8_FLOAT32 * (tokens * (into + out) + into * out)
            steps.append(multiplied)
        largest = max(largest, *steps)
    return largest


def _kernel_bytes(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes that the attention kernel needs besides its inputs and output.

    - On a CPU in bfloat16, the kernel needs none.
    - On a GPU, the result is the maximum over FlashInfer and FlexAttention, because the planner does not know
      which one is installed.
    - In all other cases, such as a quantized KV cache, the hf engine uses its reference attention in PyTorch.
      The result is the bytes of K and V that it copies out of the KV pool, and of its mask.
    """
    flags = chosen.flags
    if flags.kv_cache_dtype != flags.dtype:
        return _gathered_bytes(architecture, chosen)
    if flags.device == "cuda":
        return max(FLASHINFER_WORKSPACE_BYTES, _flex_bytes(architecture, chosen))
    return 0 if flags.dtype == "bfloat16" else _gathered_bytes(architecture, chosen)


def _flex_bytes(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of FlexAttention's padded queries and outputs, and of its lists of KV blocks.

    Each tile of queries has a list with one int32 per KV block.
    """
    rows = chosen.max_num_batched_tokens + chosen.max_num_seqs * FLEX_TILE
    blocks = -(-chosen.max_model_len // chosen.block_size)
    padded = 2 * rows * architecture.heads * architecture.head_size * DTYPE_BYTES[chosen.flags.dtype]
    return padded + (rows // FLEX_TILE + chosen.max_num_seqs) * blocks * 4


def _gathered_bytes(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of K and V that the reference attention copies out of the KV pool, and of its mask.

    The copy holds the larger of one sequence of max_model_len tokens and GATHERED_TOKENS tokens of several
    sequences. The mask has shape [queries, query heads per KV head, max_model_len]. Each element of the mask
    takes one byte plus the bytes of one value of the model's dtype.
    """
    flags = chosen.flags
    size = DTYPE_BYTES[flags.dtype]
    tokens = max(chosen.max_model_len, min(GATHERED_TOKENS, chosen.max_num_seqs * chosen.max_model_len))
    narrow = HF_KV_DTYPE_BYTES.get(flags.kv_cache_dtype, size) == 1
    copies = 2 * size + (8 if narrow else 0)  # an 8-bit K or V also has a temporary float32 copy
    groups = architecture.heads // architecture.kv_heads
    queries = min(chosen.max_num_batched_tokens, chosen.max_model_len)
    mask = queries * groups * chosen.max_model_len * (1 + size)
    return tokens * architecture.kv_heads * architecture.head_size * copies + mask
