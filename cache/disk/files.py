"""Names, sizes and times of a model's files, which identify the model in a disk tier's namespace.

A server with other weights has another namespace, so it never reads KV blocks of this model.
"""

from __future__ import annotations

import os
from pathlib import Path

_KEPT = (".safetensors", ".gguf", ".bin", ".pt", "config.json")


def files_of(model: str) -> list[tuple[str, int, int]]:
    """Return name, bytes and modification time (ns) of a local model's weights and config.

    Args:
        model: a folder, or a single file such as a GGUF file. The result is empty for the name of a hub model.
    """
    path = Path(model)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = [each for each in path.iterdir() if each.name.endswith(_KEPT)]
    else:
        return []
    found = [(each.name, os.stat(each)) for each in files]
    return sorted((name, state.st_size, state.st_mtime_ns) for name, state in found)
