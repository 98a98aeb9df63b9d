"""Engine versions: "0.9.2.dev364+gb432b7a28" -> (0, 9, 2), and which one is installed."""

from __future__ import annotations

import os
import re
import sys
from functools import cache

from tonnage.planner.errors import DeploymentError

Version = tuple[int, int, int]

_PATTERN = r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?([.\-+]?[0-9A-Za-z][0-9A-Za-z.+\-]*)?"


def parse_version(text: str, field: str = "--engine-version") -> Version:
    """Release number without what follows it (rc1, .post1, .dev364+g...). Raises DeploymentError."""
    match = re.fullmatch(_PATTERN, text.strip(), re.ASCII)
    if match is None:
        raise DeploymentError(f"{text[:40]!r} is not a version", field=field, hint="for example 0.11.0")
    return int(match[1]), int(match[2]), int(match[3] or 0)


@cache
def installed_version(name: str) -> str | None:
    """Version of an installed distribution, read from the name of its .dist-info folder (importlib.metadata
    takes 30 ms to import, half of the time a plan may take)."""
    prefixes = {name.lower() + "-", name.lower().replace("-", "_") + "-"}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            lower = entry.lower()
            if lower.endswith(".dist-info") and any(lower.startswith(prefix) for prefix in prefixes):
                return entry[: -len(".dist-info")].rpartition("-")[2]
    return None
