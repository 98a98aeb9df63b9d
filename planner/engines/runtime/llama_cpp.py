"""llama.cpp's compute buffer, its process on a CPU, and the host memory of llama-server on a GPU.

Source files are llama.cpp's, at the revision of llama-cpp-python 0.3.36. The model file is memory-mapped, so
its parts that stay on the host (the embeddings) are page cache.
"""

from __future__ import annotations

from math import prod

from tonnage.planner.devices.catalogue import capability_of
from tonnage.planner.engines.runtime.estimate import Estimate
from tonnage.planner.engines.runtime.host import HostInputs, page_cache
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.host import HostMemory, HostPart
from tonnage.planner.plans import Resolved
from tonnage.planner.units import GiB, MiB

# Anonymous memory of llama-server besides its caches, assumed from two reports. A 12B model on CUDA takes 8.3
# GB,
# of which 7,377.676 MiB are the prompt cache (ollama/ollama#18264). An embedding model takes 0.08 GiB
# (Tanguille/cluster#4341).
_PROCESS, _PROCESS_LOW, _PROCESS_HIGH = 6 * GiB // 10, 8 * GiB // 100, 3 * GiB // 2
# Memory of llama-server on a CPU. Its library takes 0.6 MiB before a model is loaded. Its tokenizer takes 282
# to 292 bytes per token of a BPE vocabulary with merges, 131 bytes per token of a SentencePiece vocabulary
# (RssAnon, llama.cpp 0.5.0, x86_64, 2026-11-23). Its HTTP server, chat templates and slots were not measured.
_SERVER, _SERVER_LOW, _SERVER_HIGH = 24 * MiB, 4 * MiB, 96 * MiB
_TOKEN, _TOKEN_LOW = 292, 131
_HELD = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # model types whose compute buffers were measured

# Bytes of the driver's context on a GPU: the median of the reports named in context_memory, their minimum, and
# an upper bound. The upper bound exceeds the largest report, 749 MiB, to allow for GPUs without a report.
_CONTEXT, _CONTEXT_LOW, _CONTEXT_HIGH = 456 * MiB, 170 * MiB, 800 * MiB
_COPIES = 4
# Context checkpoints per slot and the minimum tokens between them (n_ctx_checkpoints and checkpoint_min_step in
# common/common.h).
_CHECKPOINTS, _CHECKPOINT_STEP = 32, 8192


def compute_buffer(architecture: Architecture, chosen: Resolved, masked: int, longest: int) -> Estimate:
    """Estimate the compute buffer: the largest tensors of a step's graph that are alive at once, in fp32.

    ggml-alloc reserves them on the device that computes the step (sched_reserve in src/llama-context.cpp).
    ``masked`` is the number of cells that all attention masks cover, ``longest`` the number of cells of the
    longest mask.

    After the layers, the logits of every token, their normed input and the last residual are alive.
    llama-fit-params reports this amount for most models. Since llama.cpp introduced n_outputs_max (2026),
    llama-server reserves logits only for its slots, which gives the lower bound.

    Within a layer, the fp16 mask is alive together with the widest of these groups of tensors:

    - MLP: gate, up and product, and four residuals.
    - Experts: the outputs of a token's experts, queries and three residuals. Gate, up and product count too, if
      they do not fit into memory that earlier tensors have freed.
    - Attention: queries, keys and values; for MLA, two tensors of the latent's width per head.
    - Recurrent states: the convolutions' inputs three times, their outputs twice, the states twice.
    - Scores, without flash attention: the scores of all heads, their fp32 mask, the queries four times, and
      keys, values and a residual once.

    The formula was compared with llama.cpp 0.3.36 and 0.5.0 on layers of different shapes of Llama, Qwen3
    (dense and MoE), DeepSeek-V3, Qwen3-Next and Gemma 3 (tests/planner/test_llama_fit.py). Several GPUs work on
    different micro-batches, so each keeps four copies of mask and residual (GGML_SCHED_MAX_COPIES in
    ggml/src/ggml-backend.cpp).
    """
    flags = chosen.flags
    context = chosen.max_model_len * (1 if flags.kv_unified else chosen.max_num_seqs)
    tokens = min(chosen.max_num_batched_tokens, context)
    # A token's inputs take 28 bytes: token id, output id and position (4 bytes each), and the indices of its
    # cells of K and V (8 bytes each; llama-graph.cpp).
    inputs = tokens * 28
    row = 4 * tokens
    residual, gate = row * architecture.hidden_size, row * architecture.intermediate_size
    mask = 2 * tokens * masked
    queries = row * architecture.heads * architecture.head_size
    keys = row * architecture.kv_heads * architecture.head_size
    logits = row * architecture.vocab_size + 2 * residual
    moments = {
        "MLP": gate * (3 if architecture.gated_mlp else 2) + 4 * residual,
        "attention": max(3 * residual + 2 * queries, residual + queries + 9 * keys // 2),
    }
    if architecture.experts:
        down = residual * max(1, architecture.experts_per_token)
        moments["experts"] = down + queries + 3 * residual + (3 * gate if residual < gate < down / 2 else 0)
    around = residual + 4 * queries + 2 * keys
    latent = next((layer.head_size for layer in architecture.cache_layers if layer.kind == "mla"), 0)
    # Each head holds its query in the latent's width twice: before and after the rotated part is added.
    if latent:
        around = moments["attention"] = 2 * row * architecture.heads * latent + queries + 3 * residual
    if states := _states(architecture):
        inputs_of, values, held = states
        sequences = chosen.max_num_seqs
        moments["states"] = row * (3 * inputs_of + 2 * values) + 2 * residual + 2 * sequences * held
    if flags.flash_attn == "off":
        moments["scores"] = row * architecture.heads * longest + mask + around
    widest = max(moments.values()) + mask + inputs
    # Older releases of llama.cpp hold one residual tensor (n_ubatch x n_embd x 4 bytes) less in the compute
    # buffer. Their logs of Qwen2.5-3B, Qwen3-235B and Kimi-K2 print 4, 8 and 14 MiB less than ``widest``
    # (tests/data/field_reports.jsonl). Without flash attention, older releases also hold no copy of the
    # queries.
    least = widest - residual - (queries if flags.flash_attn == "off" else 0)
    ranks = flags.tensor_parallel_size * flags.pipeline_parallel_size
    copies = _COPIES * (mask + residual) if ranks > 1 else 0
    value = max(logits, widest) + copies
    high = value + mask + 2 * residual + inputs
    if architecture.model_type not in _HELD:  # compute buffer not measured, so wider bounds are assumed
        least, high = least * 4 // 5, high + value // 2
    said = ", ".join(f"{name} {size:,}" for name, size in moments.items())
    formula = f"max(logits {logits:,}, max({said}) + mask {mask:,}) for {tokens:,} tokens"
    if copies:
        formula += f" + {_COPIES} copies of mask and residual {copies:,}"
    source = "llama-fit-params --fit-print; largest live tensors"
    return Estimate(value, min(value, least), high, formula, source)


def _states(architecture: Architecture) -> tuple[int, int, int] | None:
    """Return three sizes of the layer with the largest recurrent state, or None without such a layer.

    The sizes are the values per token that the layer's convolutions read, the values per token that the layer
    outputs, and the bytes of its recurrent state in fp32.
    """
    found = []
    for layer in architecture.cache_layers:
        if layer.kind == "state":
            shapes = [state.shape for state in layer.states]
            read = sum(shape[-1] for shape in shapes if len(shape) == 2 and shape[0] < shape[1])
            kept = next((shape for shape in shapes if len(shape) == 3), (0, 0, 0))
            found.append((read, kept[0] * kept[1], 4 * prod(kept)))
    return max(found, default=None)


def process(architecture: Architecture, chosen: Resolved, partial: int) -> Estimate:
    """Estimate the memory of llama-server on a CPU, without the model, KV cache and compute buffer.

    ``partial`` is the bytes of one sequence in layers that llama.cpp cannot roll back (sliding windows,
    recurrent states).
    """
    vocabulary = architecture.vocab_size
    # The work buffer of ggml's CPU backend holds the right-hand operand of a matrix product in 16 bits
    # (ggml_graph_plan in ggml-cpu.c).
    work = 2 * chosen.max_num_batched_tokens * max(architecture.intermediate_size, architecture.hidden_size)
    value = _SERVER + vocabulary * _TOKEN + work
    slots = chosen.max_num_seqs
    kept = chosen.flags.cache_ram_bytes + slots * _CHECKPOINTS * partial
    formula = f"program {_SERVER:,} + vocabulary {vocabulary:,} x {_TOKEN} + operands {work:,}"
    if kept:
        formula += (
            f"; prompt cache and context checkpoints up to {kept:,} more (--cache-ram, --ctx-checkpoints)"
        )
    low = _SERVER_LOW + vocabulary * _TOKEN_LOW
    high = value + _SERVER_HIGH - _SERVER + vocabulary * _TOKEN + kept
    source = "RssAnon of llama.cpp 0.5.0's library, vocabularies of 49,152 to 262,144; the program is assumed"
    return Estimate(value, low, high, formula, source)


def context_memory(chosen: Resolved) -> Estimate:
    """Estimate the GPU memory that llama.cpp's memory breakdown prints as "unaccounted".

    It consists of the driver's context, cuBLAS, the kernels' memory pools, and the memory of other programs on
    the GPU.
    """
    nvidia = capability_of(chosen.flags.gpu) is not None or chosen.flags.gpu is None
    return Estimate(
        _CONTEXT, _CONTEXT_LOW if nvidia else 0, _CONTEXT_HIGH,
        f"context, libraries and their pools {_CONTEXT:,}",
        "unaccounted in llama.cpp's memory breakdown: 451 to 541 MiB on RTX 4090 and 3090, 749 on an RTX PRO "
        "6000 (ggml-org/llama.cpp#15860, #27953); context and cuBLAS alone 170 (dogkeeper886/ollama37#183)",
    )  # fmt: skip


def host_memory(hosted: HostInputs, partial: int, masked: int) -> HostMemory:
    """Return the host memory of llama-server on GPUs.

    ``partial`` is the bytes of one sequence in layers that llama.cpp cannot roll back (sliding windows,
    recurrent states). A context checkpoint is a copy of these bytes. ``masked`` is the number of cells that all
    attention masks cover.
    """
    chosen, slots = hosted.chosen, hosted.chosen.max_num_seqs
    tokens = chosen.max_num_batched_tokens
    residual, mask = 4 * tokens * hosted.architecture.hidden_size, 2 * tokens * masked
    copies = _COPIES if len(hosted.ranks) > 1 else 1
    inputs = 2 * residual + 2 * copies * mask
    parts = [
        HostPart("process", _PROCESS, _PROCESS_LOW, _PROCESS_HIGH,
                 f"{_PROCESS:,}: program, CUDA",
                 "assumed, from reports (ollama/ollama#18264, Tanguille/cluster#4341)"),
        HostPart("inputs of a step", inputs, residual + mask, inputs + 2 * mask,
                 f"2 x {residual:,}, embeddings of {tokens:,} tokens, + {copies} x masks in fp32 {2 * mask:,}",
                 "CUDA_Host compute buffer of start-up logs (tests/data/field_reports.jsonl)"),
    ]  # fmt: skip
    kept = chosen.flags.cache_ram_bytes
    if kept:
        longest = hosted.tokens // (1 if chosen.flags.kv_unified else max(1, slots))
        one = longest * (hosted.block_bytes // hosted.layout.block_size)
        parts.append(
            HostPart(
                "prompt cache", kept, 0, kept + one,
                f"{kept:,}, once it is full; above it the prompt being saved, {one:,} at full length",
                "--cache-ram; server_prompt_cache in tools/server, ggml-org/llama.cpp#22629", "serving",
            )
        )  # fmt: skip
    if partial:
        expected = min(_CHECKPOINTS, 1 + chosen.max_model_len // _CHECKPOINT_STEP)
        parts.append(
            HostPart(
                "context checkpoints", slots * expected * partial, 0, slots * _CHECKPOINTS * partial,
                f"{slots} slots x {expected} of at most {_CHECKPOINTS} x {partial:,}",
                "--ctx-checkpoints; create_checkpoint in tools/server/server-context.cpp", "serving",
            )
        )  # fmt: skip
    return HostMemory(tuple(parts), page_cache(hosted))
