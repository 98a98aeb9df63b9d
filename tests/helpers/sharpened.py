"""A copy of the demo model whose answers are greedy at temperature 1, for clients that send no temperature.

python tests/helpers/sharpened.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from tonnage.server.demo.model import ensure_demo

# The logits become so large that sampling takes the most likely token. A power of two is exact in bfloat16.
SHARPER = 64.0


def sharpen(folder: Path) -> None:
    """Write the demo model into ``folder``, with logits scaled by a power of two."""
    demo = ensure_demo()
    for file in demo.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    tensors = load_file(demo / "model.safetensors")
    tensors["model.norm.weight"] *= SHARPER
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    sharpen(Path(sys.argv[1]))
