"""The modules of a folder, so that what stands in one needs no list beside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def modules_in(package: str, first: tuple[str, ...], near: str = "") -> Iterator[Any]:
    """Imported one after another: those whose name begins ``near``, then ``first``, then the others. Stop
    where it is found what was looked for: the rest is not imported."""
    files = (file.partition(".") for file in os.listdir(import_module(package).__path__[0]))
    names = {name for name, _, ending in files if ending == "py" and name != "__init__"}
    close = sorted((name for name in names if near.startswith(name)), key=len, reverse=True)
    for name in dict.fromkeys((*close, *first, *sorted(names))):
        yield import_module(f"{package}.{name}")
