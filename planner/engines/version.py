"""Versions of engines: parsing "0.9.2.dev364+gb432b7a28" to (0, 9, 2), and look-up of the installed version."""

from __future__ import annotations

import os
import re
import sys
from functools import cache

from tonnage.planner.errors import DeploymentError

Version = tuple[int, int, int]

_PATTERN = r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?([.\-+]?[0-9A-Za-z][0-9A-Za-z.+\-]*)?"


def parse_version(text: str) -> Version:
    """Return the release number of a version, without suffixes such as rc1, .post1 or .dev364+g.

    Raises:
        DeploymentError: ``text`` is not a version.
    """
    match = re.fullmatch(_PATTERN, text.strip(), re.ASCII)
    if match is None:
        raise DeploymentError(
            f"{text[:40]!r} is not a version", field="--engine-version", hint="for example 0.11.0"
        )
    return int(match[1]), int(match[2]), int(match[3] or 0)


def installed_version(name: str) -> str | None:
    """Return the version of the Python distribution ``name``, or None if it is not installed.

    The name may have dashes or underscores.
    """
    return _installed().get(name.lower().replace("_", "-"))


@cache
def _installed() -> dict[str, str]:
    """Return the version of every Python distribution on sys.path, from the names of the .dist-info folders.

    importlib.metadata is not used because its import takes 30 ms.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith(".dist-info"):
                name, _, version = entry.removesuffix(".dist-info").rpartition("-")
                found.setdefault(name.lower().replace("_", "-"), version)
    return found
