"""Registry of incomplete checkpoint files: only their first bytes are available, but their full size is known.

The planner in a browser receives only the first bytes of a checkpoint, which may have many GB.
"""

from __future__ import annotations

from pathlib import Path

_WHOLE: dict[str, int] = {}


def register(path: Path, size: int) -> None:
    """Register that `path` holds the first bytes of a file of `size` bytes."""
    _WHOLE[str(path.absolute())] = size


def size_of(path: Path, here: int) -> int:
    """Return the size in bytes of the whole checkpoint file, if `register` has stored it; otherwise `here`.

    `here` is the number of bytes available at `path`.
    """
    return max(here, _WHOLE.get(str(path.absolute()), 0)) if _WHOLE else here
