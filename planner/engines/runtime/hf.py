"""The hf engine's memory beside weights and KV pool: the framework's own, and the activations of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.planner.engines.runtime.api import framework
from tonnage.planner.engines.runtime.estimate import Estimate, scaled
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES, HF_KV_DTYPE_BYTES
from tonnage.planner.model.host import HostMemory, HostPart
from tonnage.planner.plans import Resolved
from tonnage.planner.units import MiB

if TYPE_CHECKING:
    from tonnage.planner.engines.runtime.host import Hosted

# hf engine on cpu. Measured on Linux x86_64, Python 3.11, torch 2.13.0+cpu, transformers 5.19, numba 0.65
# (RssAnon of each process under the load of benchmarks/memory_limit.py, pool 512 MiB): engine process, weights
# and pool taken off, 321 MiB when ready and at most 356 under load, of which 30 are the activations below; some
# 45 of it are numba's compiler. The API process when ready (benchmarks/memory_terms.py): 54 MiB with 1,024
# tokens in the vocabulary, 67 with SmolLM2's 49,152, 149 with Gemma's 262,144; 3 more with 64 clients, 8 with
# 256. The interval covers other allocators.
API_PROCESS_BYTES = 66 * MiB
API_TOKEN_BYTES = 400
HF_CHILD_BYTES = 328 * MiB
HF_INTERVAL = (0.85, 1.25)

# Copies of the logits that are alive at once: the model's own and their fp32 copy; the hf engine's sampler
# adds a few for 16 rows at a time (server/engines/hf/sampling/draw.py). benchmarks/memory_terms.py compares.
LOGITS_COPIES = 2
ACTIVATION_INTERVAL = (0.5, 2.0)

# Tokens that the hf engine's reference attention gathers at a time for decodes: contexts are padded to the
# longest, so that a long one among many short ones would cost its length for each.
GATHERED_TOKENS = 16384

# What FlashInfer's wrapper is given to keep partial results in: 128 MiB, as its documentation and vLLM's
# attention backend do (flashinfer/prefill.py; vllm/v1/attention/backends/flashinfer.py).
FLASHINFER_WORKSPACE_BYTES = 128 * MiB
# Queries that a sequence's last tile is filled up to for FlexAttention (server/engines/hf/attention/flex.py).
FLEX_TILE = 16


def api_bytes(vocab_size: int) -> int:
    """Of the API process while nobody sends anything large."""
    return API_PROCESS_BYTES + vocab_size * API_TOKEN_BYTES


def framework_bytes(vocab_size: int) -> Estimate:
    """What the processes hold before weights and pool, and what clients and grammars of answers may take."""
    return framework(
        api_bytes(vocab_size) + HF_CHILD_BYTES,
        vocab_size,
        HF_INTERVAL,
        f"API process {API_PROCESS_BYTES:,} + {API_TOKEN_BYTES} each + engine process {HF_CHILD_BYTES:,}",
        "RssAnon after imports, torch 2.13 cpu, llguidance 1.7",
    )


# Threads that transformers reads weights with (GLOBAL_WORKERS in core_model_loading.py, 5.19).
_READERS = 4


def host_memory(hosted: Hosted) -> HostMemory:
    """Of the hf engine on a GPU: its processes as on a CPU, and CUDA."""
    from tonnage.planner.engines.runtime import host  # a plan for a CPU has none

    held = framework_bytes(hosted.architecture.vocab_size)
    processes = HostPart("processes", held.value, held.low, held.high, held.formula, held.source)
    parts = (processes, host.cuda(len(hosted.ranks)), *host.reading(hosted, _READERS))
    return HostMemory(parts, host.page_cache(hosted))


def activation_bytes(architecture: Architecture, chosen: Resolved) -> Estimate:
    """Peak beside the weights while one step of ``max_num_batched_tokens`` tokens runs.

    The widest moment of a layer (attention or MLP) plus the residual stream, and the logits of
    ``max_num_seqs`` sequences; both counted, because allocators seldom give the first back in time.
    """
    tokens = chosen.max_num_batched_tokens
    seqs = chosen.max_num_seqs
    size = DTYPE_BYTES[chosen.flags.dtype]
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    q = architecture.heads * architecture.head_size
    kv = architecture.kv_heads * architecture.head_size
    # attention: q, k, v, their rotated copies of q and k, the output; MLP: gate, up, product or in, out
    attention = tokens * (3 * q + 3 * kv) * size
    mlp = tokens * inner * (3 if architecture.gated_mlp else 2) * size
    residual = 2 * tokens * hidden * size
    logits = seqs * architecture.vocab_size * 4 * LOGITS_COPIES
    gathered = _kernel_bytes(architecture, chosen)
    if architecture.kind == "encoder":  # vectors are taken from the hidden states, and nothing is paged
        logits = gathered = 0
    value = max(attention + gathered, mlp) + residual + logits
    formula = (
        f"max(attention {attention + gathered:,}, MLP {mlp:,}) + residual {residual:,} for {tokens:,} tokens "
        f"+ logits {seqs:,} x {architecture.vocab_size:,} x 4 x {LOGITS_COPIES} = {logits:,}"
    )
    return scaled(value, ACTIVATION_INTERVAL, formula, "max_num_batched_tokens, max_num_seqs, vocab_size")


def _kernel_bytes(architecture: Architecture, chosen: Resolved) -> int:
    """What the attention takes beside its inputs and output. The CPU's bfloat16 kernel: nothing. A GPU's: the
    most that any of them takes, because which is installed there is not known here. The reference, for all
    others: what it gathers."""
    flags = chosen.flags
    if flags.kv_cache_dtype != flags.dtype:
        return _gathered_bytes(architecture, chosen)
    if flags.device == "cuda":
        return max(FLASHINFER_WORKSPACE_BYTES, _flex_bytes(architecture, chosen))
    return 0 if flags.dtype == "bfloat16" else _gathered_bytes(architecture, chosen)


def _flex_bytes(architecture: Architecture, chosen: Resolved) -> int:
    """Queries and their output padded to whole tiles, and for each tile (int32) the blocks that it reads."""
    rows = chosen.max_num_batched_tokens + chosen.max_num_seqs * FLEX_TILE
    blocks = -(-chosen.max_model_len // chosen.block_size)
    padded = 2 * rows * architecture.heads * architecture.head_size * DTYPE_BYTES[chosen.flags.dtype]
    return padded + (rows // FLEX_TILE + chosen.max_num_seqs) * blocks * 4


def _gathered_bytes(architecture: Architecture, chosen: Resolved) -> int:
    """K and V that the reference attention copies out of the pool: one sequence of max_model_len tokens, or
    GATHERED_TOKENS of several. The chunk's mask: a byte, and the same in the model's dtype, for each query of
    each head of a group and each token it may see."""
    flags = chosen.flags
    size = DTYPE_BYTES[flags.dtype]
    tokens = max(chosen.max_model_len, min(GATHERED_TOKENS, chosen.max_num_seqs * chosen.max_model_len))
    narrow = HF_KV_DTYPE_BYTES.get(flags.kv_cache_dtype, size) == 1
    copies = 2 * size + (8 if narrow else 0)  # and a float32 copy between
    groups = architecture.heads // architecture.kv_heads
    queries = min(chosen.max_num_batched_tokens, chosen.max_model_len)
    mask = queries * groups * chosen.max_model_len * (1 + size)
    return tokens * architecture.kv_heads * architecture.head_size * copies + mask
