"""Bars of a terminal: shaded blocks where its encoding has them, ASCII elsewhere."""

from __future__ import annotations

import os
from typing import TextIO

SHADES = "█▓▒░"  # from full to empty
ASCII = "#+:."


def redraws(file: TextIO) -> bool:
    """Whether it is a terminal where a line can be drawn again. A dumb one (Emacs' shell, some CI) cannot, and
    rich shows nothing there until the end (Console.is_dumb_terminal)."""
    return file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def shades(file: TextIO) -> str:
    """Four characters that ``file`` can encode, from full to empty."""
    try:
        SHADES.encode(file.encoding or "ascii")
    except (AttributeError, LookupError, UnicodeEncodeError):  # AttributeError: a file without an encoding
        return ASCII
    return SHADES


def cells(part: int, whole: int, width: int) -> int:
    """How many of ``width`` cells ``part`` of ``whole`` fills."""
    return max(0, min(width, round(width * part / whole))) if whole > 0 else 0
