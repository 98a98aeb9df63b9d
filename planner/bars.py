"""Characters with which bars are drawn in a terminal: shaded blocks if the encoding has them, else ASCII."""

from __future__ import annotations

import os
from typing import TextIO

SHADES = "█▓▒░"  # characters of a bar, from full to empty
ASCII = "#+:."


def redraws(file: TextIO) -> bool:
    """Return whether the output file is a terminal that can erase a line and print it again.

    A dumb terminal (Emacs' shell, some CI systems) cannot redraw. The library rich also shows progress only at
    the end on a dumb terminal (Console.is_dumb_terminal).
    """
    return file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def shades(file: TextIO) -> str:
    """Return the four characters of a bar, from full to empty, as shaded blocks or ASCII.

    Shaded blocks are used if `file` can encode them.
    """
    try:
        SHADES.encode(file.encoding or "ascii")
    except (AttributeError, LookupError, UnicodeEncodeError):  # AttributeError: the file has no `encoding`
        return ASCII
    return SHADES


def cells(part: int, whole: int, width: int) -> int:
    """Return how many of the `width` characters of a bar to fill for the fraction `part` / `whole`."""
    return max(0, min(width, round(width * part / whole))) if whole > 0 else 0
