"""Discovery of the modules in a package. With it, a package such as `families` needs no list of its modules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def modules_in(package: str, first: tuple[str, ...], near: str = "") -> Iterator[Any]:
    """Import and yield the modules of a package one by one.

    If the caller stops iterating, the remaining modules are not imported.

    Args:
        package: name of the package.
        first: names of modules to yield before the remaining ones.
        near: a name, such as a model type. Modules whose own name is a prefix of `near` come even before those
            of `first`, the longest name first.
    """
    files = (file.partition(".") for file in os.listdir(import_module(package).__path__[0]))
    names = {name for name, _, ending in files if ending == "py" and name != "__init__"}
    close = sorted((name for name in names if near.startswith(name)), key=len, reverse=True)
    for name in dict.fromkeys((*close, *first, *sorted(names))):
        yield import_module(f"{package}.{name}")
