"""Integer arithmetic shared by the modules of this package."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
