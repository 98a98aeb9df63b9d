"""Archives of machine code that was compiled ahead of time, one for each set of CPU instructions.

`python -m tonnage.server.engines.hf.ahead` writes the archives into `FOLDER`. From there they go into a wheel
or an image. For each function and signature an archive holds the data that numba would keep in a cache folder.
The names of its members contain a digest of the sources and the versions of Python and numba, so that machine
code of another version is never used.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core.caching import FunctionCache, NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

FOLDER = Path(__file__).parent / "machine_code"


@dataclass(frozen=True, slots=True)
class Level:
    """A set of CPU instructions that an archive of machine code is compiled for.

    Attributes:
        name: Name of the set, and of its archive.
        cpu: LLVM's name of the processor to compile for.
        needs: LLVM's names of the features that a processor must have.
    """

    name: str
    cpu: str
    needs: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Path of the archive of machine code compiled for this set of CPU instructions."""
        return FOLDER / f"{self.name}.zip"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which numba compiles for this set of CPU instructions."""
        return {
            "NUMBA_CPU_NAME": self.cpu,
            "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in self.needs),
        }


# The feature lists follow the x86-64 psABI 1.0, table 3.1.
_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# The best set of instructions comes first. AVX512-BF16 exists from Cooper Lake, Sapphire Rapids and Zen 4 on.
LEVELS = (
    Level("x86-64-v4-bf16", "x86-64-v4", (*_V4, "avx512bf16")),
    Level("x86-64-v4", "x86-64-v4", _V4),
    Level("x86-64-v3", "x86-64-v3", _V3),
)


def level_here() -> Level | None:
    """Return the best set of `LEVELS` that this processor supports, or None if it supports no set."""
    features = llvm.get_host_cpu_features()
    return next((level for level in LEVELS if all(features.get(each) for each in level.needs)), None)


def has(feature: str) -> bool:
    """Return whether code compiled now may use the CPU feature ``feature``, by LLVM's name.

    The features are this processor's, or NUMBA_CPU_FEATURES if that is set.
    """
    if numba.config.CPU_FEATURES is not None:
        return f"+{feature}" in numba.config.CPU_FEATURES.split(",")
    return bool(llvm.get_host_cpu_features().get(feature, False))


def write(path: Path, compiled: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write a zip archive of machine code that was compiled ahead of time to the file ``path``.

    ``compiled`` maps the name of a set of functions to its members, the compiled functions by name. Members of
    one set are compressed together, because they contain code of the same callees. The archive then takes
    1 MB instead of 2 MB.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, members in compiled.items():
            archive.writestr(name, pickle.dumps(dict(members)))


def read(path: Path, name: str) -> dict[str, bytes]:
    """Return the compiled functions of the set ``name`` in an archive of machine code, as bytes by name.

    The result is empty if the archive at ``path`` is missing or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found: dict[str, bytes] = pickle.loads(archive.read(name))
    except Exception:  # a damaged file, or a Python built without lzma: the functions are compiled again
        return {}
    return found


class Archive:
    """The machine code that was compiled ahead of time for one version of the sources, on this processor.

    It is empty if numba compiles for another processor or not at all. While an archive is being made
    (`collect`), `collected` receives the newly compiled code.
    """

    def __init__(self, digest: str) -> None:
        about = (sys.platform, sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, digest)
        self.name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        self.collected: dict[str, bytes] | None = None

    @cached_property
    def _members(self) -> dict[str, bytes]:
        config, level = numba.config, level_here()
        own_choice = config.CPU_NAME is not None or config.CPU_FEATURES is not None or not config.ENABLE_AVX
        if level is None or own_choice or config.DISABLE_JIT:
            return {}
        return read(level.path, self.name)

    def __contains__(self, member: str) -> bool:
        return member in self._members

    def collect(self) -> None:
        """Collect newly compiled machine code in `collected` from now on, and stop reading the archive."""
        self.collected = {}
        self._members = {}

    def take(self, member: str) -> Any:
        """Remove and return one compiled function in numba's serialized form, or None if it is not stored."""
        found = self._members.pop(member, None)
        return None if found is None else pickle.loads(found)


class AheadOrKept(NullCache):  # type: ignore[misc]
    """A cache of one function's machine code, with the interface of numba's cache (core/caching.py, 0.65).

    It reads the archive of code compiled ahead of time first, then a cache folder.
    """

    def __init__(self, function: Callable[..., Any], archive: Archive, kept: FunctionCache | None) -> None:
        self._archive = archive
        self._kept = NullCache() if kept is None else kept
        code = function.__code__
        closed = tuple(cell.cell_contents for cell in function.__closure__ or ())
        digest = hashlib.sha256(code.co_code + dumps(closed)).hexdigest()[:16]
        self._name = f"{function.__module__}.{function.__qualname__}-{code.co_firstlineno}-{digest}"

    @property
    def cache_path(self) -> str | None:
        """Path of numba's cache folder, which is read if the archive of compiled code lacks a function."""
        path: str | None = self._kept.cache_path
        return path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return a function compiled for one signature, from the archive or numba's cache folder, or None."""
        found = self._archive.take(self._member(sig))
        if found is not None:
            target_context.refresh()
            return CompileResult._rebuild(target_context, *found)
        return None if self._archive.collected is not None else self._kept.load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a compiled function in the archive that is being made, if any, else in numba's cache folder."""
        if self._archive.collected is not None:
            # numba's type annotation of the function is left out. It would take an eighth of the archive, and
            # only inspect_types() reads it.
            self._archive.collected[self._member(sig)] = dumps(data._replace(type_annotation="")._reduce())
        else:
            self._kept.save_overload(sig, data)

    def _member(self, sig: Any) -> str:
        return f"{self._name}-{hashlib.sha256(str(sig).encode()).hexdigest()[:16]}"
