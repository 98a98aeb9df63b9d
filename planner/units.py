"""Parsing and formatting of sizes, counts and times. Inside the planner, bytes are always `int`."""

from __future__ import annotations

import re

from tonnage.planner.errors import DeploymentError

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = r"\s*(\d+)(?:\.(\d{1,18}))?\s*([A-Za-z]*)\s*"
MAX_BYTES = 1 << 60  # one EiB, the largest accepted size: a larger one must be a typo


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def parse_seconds(text: str, field: str) -> float:
    """Return the seconds in a text such as `500ms`, `1s`, `2min` or a plain number.

    Raises:
        DeploymentError: the text is not a time; the error names the flag `field`.
    """
    for unit, factor in (("ms", 1e-3), ("min", 60.0), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * factor
            except ValueError:
                continue
            if 0 <= value < float("inf"):
                return value
    raise DeploymentError(f"{text!r} is not a time", field=field, hint="for example 500ms, 1s, 2min")


def parse_size(text: str, field: str) -> int:
    """Return the bytes in a text such as `512MiB`, `2GB`, `1.5GiB` or a plain number, rounded down.

    `2G` is rejected, because some tools read it as GiB and others as GB.

    Raises:
        DeploymentError: the text is not a size; the error names the flag `field`.
    """
    match = re.fullmatch(_SIZE, text, re.ASCII)
    factor = _FACTORS.get(match[3].lower()) if match else None
    if match is None or factor is None:
        raise DeploymentError(
            f"{text[:40]!r} is not a size", field=field, hint="write 2GiB, 512MiB, 2GB or plain bytes"
        )
    # The size is computed in integers: a float loses bytes, and fractions.Fraction takes 10 ms to import.
    decimals = match[2] or ""
    size = int(match[1] + decimals) * factor // int("1" + "0" * len(decimals))
    if not 0 < size <= MAX_BYTES:
        raise DeploymentError(f"{text[:40]!r} is not between 1 byte and 1 EiB", field=field)
    return size


def parse_count(text: str, field: str, *, least: int = 1) -> int:
    """Return the integer in a text with vLLM's suffixes: `8k` is 8,000 and `8K` is 8,192 (also m and M).

    Raises:
        DeploymentError: the text is not an integer of at least `least`; the error names the flag `field`.
    """
    match = re.fullmatch(r"(\d{1,18})([kKmM]?)", text.strip(), re.ASCII)
    factor = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}[match[2] if match else ""]
    if match is None or int(match[1]) * factor < least:
        wanted = "a positive integer" if least == 1 else f"an integer from {least} on"
        plain = text.strip().replace(",", "").replace("_", "")
        hint = f"write {plain}" if plain != text.strip() and plain.isdecimal() and plain.isascii() else None
        raise DeploymentError(f"{text[:40]!r} is not {wanted}", field=field, hint=hint)
    return int(match[1]) * factor


def parse_port(text: str) -> int:
    """Parse the port number of the option `--port`.

    Raises:
        DeploymentError: the text is not a port number from 0 to 65535.
    """
    if not text.isdecimal() or not text.isascii() or len(text) > 5 or int(text) > 65_535:
        raise DeploymentError(
            f"{text[:40]!r} is not a port number", field="--port", hint="from 0 (a free one) to 65535"
        )
    return int(text)


def gib(size: int) -> str:
    """Format bytes as `1.98 GiB`, or in MiB below 1 GiB so that small sizes stay readable."""
    if abs(size) >= GiB:
        return f"{size / GiB:,.2f} GiB"
    return f"{size / MiB:,.1f} MiB"
