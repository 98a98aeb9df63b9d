"""llama.cpp's compute buffer on a CPU, and the host's memory of llama-server on a GPU. Files named are
llama.cpp's, as llama-cpp-python 0.3.36 has them.

The model's file is mapped: what stays in it (the embeddings) is page cache.
"""

from __future__ import annotations

from tonnage.planner.engines.runtime.estimate import Estimate
from tonnage.planner.engines.runtime.host import Hosted, page_cache
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.host import HostMemory, HostPart
from tonnage.planner.plans import Resolved
from tonnage.planner.units import GiB

# Anonymous memory beside the caches; assumed, from reports: 8.3 GB of which the prompt cache says 7,377.676 MiB
# with a 12B model on CUDA (ollama/ollama#18264), 0.08 GiB of an embedder (Tanguille/cluster#4341).
_PROCESS, _PROCESS_LOW, _PROCESS_HIGH = 6 * GiB // 10, 8 * GiB // 100, 3 * GiB // 2
# n_ctx_checkpoints and checkpoint_min_step of common/common.h
_CHECKPOINTS, _CHECKPOINT_STEP = 32, 8192


def compute_buffer(architecture: Architecture, chosen: Resolved, cells: int) -> Estimate:
    """What a step's graph takes on a CPU, ``cells`` of the cache a sequence: the largest tensors that live at
    once, in fp32, as ggml-alloc reserves them (sched_reserve in src/llama-context.cpp).

    Behind the layers: logits of every token, their normed input and the last residual. In an MLP: gate, up and
    product, four residuals, the attention mask in fp16. The larger of the two is what llama-fit-params says of
    a Llama; with several sequences or a packed cache up to a mask and two residuals more, which lie between.
    llama-server reserves logits of its slots alone since n_outputs_max: the lower end.
    """
    tokens = min(chosen.max_num_batched_tokens, chosen.max_model_len * chosen.max_num_seqs)
    hidden, inner, vocab = architecture.hidden_size, architecture.intermediate_size, architecture.vocab_size
    inputs = tokens * 28  # ids of tokens and outputs, positions, cells of K and of V (llama-graph.cpp)
    residual, mask = tokens * hidden * 4, tokens * cells * 2
    logits = tokens * vocab * 4 + 2 * residual
    mlp = tokens * inner * 4 * (3 if architecture.gated_mlp else 2) + 4 * residual + mask + inputs
    value = max(logits, mlp)
    high = value + mask + 2 * residual + inputs
    if architecture.model_type != "llama":  # other graphs were not held against it
        high += value // 2
    formula = f"max(logits {logits:,}, MLP {mlp:,}) for {tokens:,} tokens"
    return Estimate(value, min(value, mlp), high, formula, "llama-fit-params --fit-print; largest live tensors")


def host_memory(hosted: Hosted, partial: int) -> HostMemory:
    """``partial``: bytes of one sequence in layers that cannot be rolled back (sliding, states), of which a
    checkpoint is a copy."""
    chosen, slots = hosted.chosen, hosted.chosen.max_num_seqs
    parts = [
        HostPart("process", _PROCESS, _PROCESS_LOW, _PROCESS_HIGH,
                 f"{_PROCESS:,}: program, CUDA, buffers of a step",
                 "assumed, from reports (ollama/ollama#18264, Tanguille/cluster#4341)")
    ]  # fmt: skip
    kept = chosen.flags.cache_ram_bytes
    if kept:
        one = hosted.tokens // max(1, slots) * (hosted.block_bytes // hosted.layout.block_size)
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
