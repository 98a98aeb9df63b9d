"""Engine versions: "0.9.2.dev364+gb432b7a28" -> (0, 9, 2)."""

from __future__ import annotations

import re

from tonnage.planner.errors import DeploymentError

Version = tuple[int, int, int]

_PATTERN = r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?([.\-+]?[0-9A-Za-z][0-9A-Za-z.+\-]*)?"


def parse_version(text: str, field: str = "--engine-version") -> Version:
    """Release number without what follows it (rc1, .post1, .dev364+g...). Raises DeploymentError."""
    match = re.fullmatch(_PATTERN, text.strip(), re.ASCII)
    if match is None:
        raise DeploymentError(f"{text[:40]!r} is not a version", field=field, hint="for example 0.11.0")
    return int(match[1]), int(match[2]), int(match[3] or 0)
