"""Bars of a terminal: shaded blocks where its encoding has them, ASCII elsewhere."""

from __future__ import annotations

from typing import TextIO

SHADES = "█▓▒░"  # from full to empty
ASCII = "#+:."


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
