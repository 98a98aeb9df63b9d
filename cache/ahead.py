"""Machine code that was compiled before the package came here: an archive for each set of instructions.

`python -m tonnage.server.engines.hf.ahead` writes the archives into `FOLDER`, from where they go into a wheel
or an image. A file of one holds, for each function and signature of some sources, what numba would keep in a
cache folder. Nothing of other sources, of another Python or another numba is found: they are part of its name.
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
    """A set of instructions: LLVM's processor of that name, and LLVM's names of what a processor must have."""

    name: str
    cpu: str
    needs: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Of its archive."""
        return FOLDER / f"{self.name}.zip"

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that compiles for it."""
        return {
            "NUMBA_CPU_NAME": self.cpu,
            "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in self.needs),
        }


# x86-64 psABI 1.0, table 3.1
_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# The best first. AVX512-BF16: Cooper Lake, Sapphire Rapids, Zen 4 and what came after them.
LEVELS = (
    Level("x86-64-v4-bf16", "x86-64-v4", (*_V4, "avx512bf16")),
    Level("x86-64-v4", "x86-64-v4", _V4),
    Level("x86-64-v3", "x86-64-v3", _V3),
)


def level_here() -> Level | None:
    """The best of `LEVELS` that this processor has; None: not even the last."""
    features = llvm.get_host_cpu_features()
    return next((level for level in LEVELS if all(features.get(each) for each in level.needs)), None)


def has(feature: str) -> bool:
    """Whether what is compiled now may use an instruction set, by LLVM's name: this processor's, or those of
    the one that NUMBA_CPU_FEATURES describes."""
    if numba.config.CPU_FEATURES is not None:
        return f"+{feature}" in numba.config.CPU_FEATURES.split(",")
    return bool(llvm.get_host_cpu_features().get(feature, False))


def write(path: Path, compiled: Mapping[str, Mapping[str, bytes]]) -> None:
    """An archive: the functions of each `Archive.name`, compressed as one, for they hold the code of the same
    callees: 1 MB, and 2 MB one by one."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, members in compiled.items():
            archive.writestr(name, pickle.dumps(dict(members)))


def read(path: Path, name: str) -> dict[str, bytes]:
    """What `write` was given under ``name``; nothing where it is not there, or cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            found: dict[str, bytes] = pickle.loads(archive.read(name))
    except Exception:  # damaged, in one of many ways, or a Python that was built without lzma: it is compiled
        return {}
    return found


class Archive:
    """What was compiled ahead of the modules that ``digest`` stands for, on this processor's level; nothing
    where numba is told to compile for another processor, or not to compile.

    Where an archive is made, `collected` takes what is compiled instead; see `collect`.
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
        """From now on keep what is compiled in `collected`, by its name in an archive; read nothing."""
        self.collected = {}
        self._members = {}

    def take(self, member: str) -> Any:
        """What numba makes a function of, which it asks for once; or None."""
        found = self._members.pop(member, None)
        return None if found is None else pickle.loads(found)


class AheadOrKept(NullCache):  # type: ignore[misc]
    """numba's cache of one function (core/caching.py, 0.65): ``archive``, and behind it the one in a folder."""

    def __init__(self, function: Callable[..., Any], archive: Archive, kept: FunctionCache | None) -> None:
        self._archive = archive
        self._kept = NullCache() if kept is None else kept
        code = function.__code__
        closed = tuple(cell.cell_contents for cell in function.__closure__ or ())
        digest = hashlib.sha256(code.co_code + dumps(closed)).hexdigest()[:16]
        self._name = f"{function.__module__}.{function.__qualname__}-{code.co_firstlineno}-{digest}"

    @property
    def cache_path(self) -> str | None:
        path: str | None = self._kept.cache_path
        return path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = self._archive.take(self._member(sig))
        if found is not None:
            target_context.refresh()
            return CompileResult._rebuild(target_context, *found)
        return None if self._archive.collected is not None else self._kept.load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        if self._archive.collected is not None:
            # An eighth of an archive, of which only inspect_types() reads.
            self._archive.collected[self._member(sig)] = dumps(data._replace(type_annotation="")._reduce())
        else:
            self._kept.save_overload(sig, data)

    def _member(self, sig: Any) -> str:
        return f"{self._name}-{hashlib.sha256(str(sig).encode()).hexdigest()[:16]}"
