"""Discovery of the modules in a package, so that a package needs no list of its modules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def modules_in(package: str, first: tuple[str, ...], near: str = "") -> Iterator[Any]:
    """Import and yield the modules of a package one by one; a caller that stops early imports no more.

    Args:
        package: name of the package.
        first: names of modules to yield before the remaining ones.
        near: a name; modules whose own name is a prefix of this name come first.
    """
    files = (file.partition(".") for file in os.listdir(import_module(package).__path__[0]))
    names = {name for name, _, ending in files if ending == "py" and name != "__init__"}
    close = sorted((name for name in names if near.startswith(name)), key=len, reverse=True)
    for name in dict.fromkeys((*close, *first, *sorted(names))):
        yield import_module(f"{package}.{name}")
