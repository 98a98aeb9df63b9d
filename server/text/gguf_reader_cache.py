"""A context manager in which transformers parses a .gguf file once instead of three times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def cached_gguf_reader() -> Iterator[None]:
    """Cache gguf's readers and tensor name maps while transformers loads a model.

    transformers 5.19 opens the file separately for its config, its tokenizer and its weights, and each time
    parses the text of every token. It also builds the map of tensor names for each module
    (modeling_gguf_pytorch_utils.py, load_gguf_checkpoint and get_gguf_hf_weights_map). For SmolLM2-135M this
    takes two thirds of the load time.
    """
    import gguf  # imported here, because gguf is an optional dependency

    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(originals[0]), cache(originals[1])  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = originals  # type: ignore[misc]
