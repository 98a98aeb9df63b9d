"""Small GGUF files, written with the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def llama_file(path: Path, *, arch: str = "llama", drop: str = "", extra: str = "", **changes) -> Path:
    """Write a small but complete llama file with the gguf package and return its path."""
    width, inner, layers, heads, kv, vocab = 64, 96, 2, 4, 2, 128
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        "context_length": 256, "embedding_length": width, "block_count": layers, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": kv, "rope.dimension_count": width // heads,
    }  # fmt: skip
    for key, value in (fields | changes).items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(5000)])
    shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,), "rope_freqs.weight": (8,)}
    for i in range(layers):
        at = f"blk.{i}."
        shapes |= {
            at + "attn_q.weight": (width, width), at + "attn_k.weight": (width // 2, width),
            at + "attn_v.weight": (width // 2, width), at + "attn_output.weight": (width, width),
            at + "ffn_gate.weight": (inner, width), at + "ffn_up.weight": (inner, width),
            at + "ffn_down.weight": (width, inner), at + "attn_norm.weight": (width,),
            at + "ffn_norm.weight": (width,),
        }  # fmt: skip
    if extra:
        shapes[extra] = (width,)
    for name, shape in shapes.items():
        if name != drop:
            writer.add_tensor(name, np.zeros(shape, np.float16 if len(shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
