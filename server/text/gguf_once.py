"""A .gguf file parsed once while transformers loads from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def parsed_once() -> Iterator[None]:
    """transformers 5.19 opens the file anew for its config, its tokenizer and its weights, each time parsing
    every token's text, and builds the map of tensor names once for each module (modeling_gguf_pytorch_utils.py,
    load_gguf_checkpoint and get_gguf_hf_weights_map): of SmolLM2-135M two thirds of the time to load it."""
    import gguf  # optional

    own = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(own[0]), cache(own[1])  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = own  # type: ignore[misc]
