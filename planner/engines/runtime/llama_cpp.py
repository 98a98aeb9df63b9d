"""llama-server on a GPU: the host's memory. Files named are llama.cpp's, as llama-cpp-python 0.3.36 has them.

The model's file is mapped: what stays in it (the embeddings) is page cache.
"""

from __future__ import annotations

from tonnage.planner.engines.runtime.host import Hosted, page_cache
from tonnage.planner.plans import HostMemory, HostPart
from tonnage.planner.units import GiB

# Anonymous memory beside the caches; assumed, from reports: 8.3 GB of which the prompt cache says 7,377.676 MiB
# with a 12B model on CUDA (ollama/ollama#18264), 0.08 GiB of an embedder (Tanguille/cluster#4341).
_PROCESS, _PROCESS_LOW, _PROCESS_HIGH = 6 * GiB // 10, 8 * GiB // 100, 3 * GiB // 2
# n_ctx_checkpoints and checkpoint_min_step of common/common.h
_CHECKPOINTS, _CHECKPOINT_STEP = 32, 8192


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
