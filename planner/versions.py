"""Installed versions, without importlib.metadata (30 ms of imports, half of the time a plan may take)."""

from __future__ import annotations

import os
import sys
from functools import cache

PLANNER_RULES = "1"
"""Raised whenever the same inputs may give another plan; part of plan_id."""


@cache
def installed_version(name: str) -> str | None:
    """Version of an installed distribution, read from the name of its .dist-info folder."""
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
