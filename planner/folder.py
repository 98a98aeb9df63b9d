"""The modules of a folder, so that what stands in one needs no list beside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def modules_in(package: str, first: tuple[str, ...]) -> Iterator[Any]:
    """Imported one after another: ``first``, then the others by name. Stop where it is found what was looked
    for: the rest is not imported."""
    for name in first:
        yield import_module(f"{package}.{name}")
    for file in sorted(os.listdir(import_module(package).__path__[0])):
        name, _, ending = file.partition(".")
        if ending == "py" and name not in first and name != "__init__":
            yield import_module(f"{package}.{name}")
