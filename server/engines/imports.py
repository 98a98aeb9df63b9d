"""Import of large libraries without garbage collection, which would slow down the import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable garbage collection while the context is open, for the imports of torch, transformers or vLLM.

    These imports create hundreds of thousands of permanent objects, which the collector would visit repeatedly.
    In the HF engine that took 1.4 of the imports' 5.0 s of processor time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
