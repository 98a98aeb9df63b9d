"""Files of which only the beginning is here: a browser hands over no more of a checkpoint of many GB."""

from __future__ import annotations

from pathlib import Path

_WHOLE: dict[str, int] = {}


def begins(path: Path, size: int) -> None:
    """``path`` holds the first bytes of a file of ``size``."""
    _WHOLE[str(path.absolute())] = size


def size_of(path: Path, here: int) -> int:
    """Length of the file that ``path`` is, or begins; ``here``: bytes that are there."""
    return max(here, _WHOLE.get(str(path.absolute()), 0)) if _WHOLE else here
