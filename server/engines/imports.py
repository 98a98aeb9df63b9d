"""Import of large libraries without garbage collection, which would slow the import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable garbage collection during the imports of torch, transformers or vLLM.

    These imports create hundreds of thousands of permanent objects, which the collector would visit repeatedly
    (measured: 1.4 of 5.0 s of processor time for the imports of the hf engine).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
