"""The compiler of the hot loops: numba, in one place, with the compiled code kept on disk.

What runs for every block of every request (hashing, matching, publishing, releasing, evicting) is written as
plain loops over arrays of ints and compiled; the same source runs uncompiled with NUMBA_DISABLE_JIT=1, and the
tests hold the two against each other. The kernels of the server's engine use the same `Compiler`.

What was compiled ahead, where the package was installed (`tonnage.cache.ahead`), is read from there. Else
compiling takes some seconds once per machine and version, and the result is kept in the user's cache folder
(XDG_CACHE_HOME or ~/.cache; NUMBA_CACHE_DIR moves it); where nothing can be written (no home, no permission,
no space), it is compiled at every start. What no start has used for a month goes when another is kept: each
version of these sources has its own folder. Only what imports the manager pays for the import; `tonnage plan`
does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import xxhash
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.registry import CPUDispatcher

from tonnage.cache import ahead
from tonnage.cache.ahead import AheadOrKept, Archive

log = logging.getLogger("tonnage.cache")

Function = TypeVar("Function", bound=Callable[..., Any])

_UNUSED_SECONDS = 30 * 86_400


class Compiler:
    """numba for the modules below one folder, whose functions are compiled into one another.

    ``folder`` holds their machine code and is named by a digest of all these modules: numba itself asks only
    whether a function's own file has changed, and not those of the functions and constants compiled into it.
    None: nothing is kept (no folder that can be written, or NUMBA_DISABLE_JIT). ``kept``: so far everything
    compiled is in it. ``archive``: what was compiled ahead of the same sources, wherever they lay.
    ``made``: its functions so far, compiled or not.
    """

    def __init__(self, sources: Path) -> None:
        # numba keeps code by the path of its source as it was imported (core/caching.py, 0.65), so another
        # installation finds nothing in this folder.
        digest = xxhash.xxh3_64(f"{numba.__version__} {sources.absolute()}".encode())
        content = xxhash.xxh3_64()
        # ahead.py says what instructions an archive may have.
        for path in (Path(__file__), Path(ahead.__file__), *sorted(sources.rglob("*.py"))):
            digest.update(text := path.read_bytes())
            content.update(text)
        cache = _cache_folder()
        folder = None if cache is None else cache / f"compiled-{digest.hexdigest()}"
        self.folder = folder if not numba.config.DISABLE_JIT and _used(folder) else None
        self.kept = self.folder is not None
        self.archive = Archive(content.hexdigest())
        self.made: list[CPUDispatcher] = []

    def __contains__(self, note: str) -> bool:
        """Whether all that the note stands for was compiled, here (`note`) or ahead."""
        return note in self.archive or (self.folder is not None and (self.folder / note).exists())

    def note(self, note: str) -> None:
        """All that it stands for is compiled and kept; the note goes when that goes."""
        if self.folder is not None and self.kept:
            with contextlib.suppress(OSError):  # not to be written: it compiles at every start
                (self.folder / note).touch()

    def progress(self) -> tuple[int, int]:
        """Functions that are compiled, and all that are there."""
        return sum(bool(each.overloads) for each in self.made), len(self.made)

    def __call__(self, function: Function, **options: Any) -> Function:
        """``function`` compiled at its first call, with numba's options. Nobody in C calls it: without the way
        in from there, a seventh of the compiler's work."""
        dispatcher = numba.njit(no_cfunc_wrapper=True, **options)(function)
        if isinstance(dispatcher, CPUDispatcher):  # not so with NUMBA_DISABLE_JIT
            # as cache=True does (core/dispatcher.py, 0.65)
            dispatcher._cache = AheadOrKept(function, self.archive, self._in_folder(function))
            self.made.append(dispatcher)
        return cast(Function, dispatcher)

    def _in_folder(self, function: Callable[..., Any]) -> _Kept | None:
        if self.folder is None:
            return None
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(self.folder)  # read when the cache is made
        try:
            return _Kept(function, self)
        except RuntimeError as error:  # numba finds no place that it can write to
            self.lost(error)
            return None
        finally:
            numba.config.CACHE_DIR = before

    def lost(self, error: Exception) -> None:
        """Something compiled could not be kept, which is said once and hinders nobody."""
        if self.kept:
            log.warning("compiled code is not kept in %s (%s): each start compiles again", self.folder, error)
        self.kept = False


class _InFolder(CompileResultCacheImpl):  # type: ignore[misc]
    """Nowhere else: numba would go on to __pycache__, which no digest of all the modules names."""

    _locator_classes = (UserProvidedCacheLocator,)


class _Kept(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function, whose errors of the disk (full, gone, not ours) cost time only."""

    _impl_class = _InFolder

    def __init__(self, function: Callable[..., Any], compiler: Compiler) -> None:
        super().__init__(function)
        self._compiler = compiler

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except OSError:  # not to be read: it is compiled
            return None

    def save_overload(self, *arguments: Any) -> None:
        try:
            super().save_overload(*arguments)
        except OSError as error:
            self._compiler.lost(error)


def _cache_folder() -> Path | None:
    """Where users keep what can be made again; None: this one has no home."""
    if own := numba.config.CACHE_DIR:
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tonnage"
    try:
        return Path.home() / ".cache" / "tonnage"
    except RuntimeError:  # no HOME, and nobody of that number in passwd: a container under any user id
        return None


def _used(folder: Path | None) -> bool:
    """Whether it can be written to; if so it is there, and marked as in use."""
    if folder is None:
        return False
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except OSError:
        return False
    if new:
        _remove_unused(folder.parent)
    return os.access(folder, os.W_OK)


def _remove_unused(cache: Path) -> None:
    """Who runs with one of them loses nothing: its code is in memory, and numba makes the folder again for what
    is compiled later."""
    for folder in cache.glob("compiled-*"):
        with contextlib.suppress(OSError):
            unused = time.time() - folder.stat().st_mtime > _UNUSED_SECONDS
            if unused and re.fullmatch("compiled-[0-9a-f]{16}", folder.name):
                shutil.rmtree(folder, ignore_errors=True)


COMPILER = Compiler(Path(__file__).parent)


def compiled(function: Function) -> Function:
    """``function`` of this package compiled; arguments are numbers, arrays and named tuples of arrays.

    Without numba's reference counts: nothing is allocated inside, and their atomic operations in the inner
    loops cost a third of the time (each waits for the stores before it).
    """
    return _once(COMPILER(function, error_model="numpy", _nrt=False))


def inner(function: Function) -> Function:
    """As `compiled`, for callers that are compiled too. The way in from Python, which takes the core apart into
    its arrays, is a quarter of the compiler's work."""
    made = _once(COMPILER(function, error_model="numpy", _nrt=False, no_cpython_wrapper=True))
    if isinstance(made, CPUDispatcher):
        made.__class__ = _Inner
    return made


def inlined(function: Function) -> Function:
    """As `compiled`, copied into each caller: for what runs once a block. A call that passes all arrays of the
    core by value costs more than what it does."""
    return cast(Function, numba.njit(error_model="numpy", _nrt=False, inline="always")(function))


class _Inner(CPUDispatcher):  # type: ignore[misc]
    def __call__(self, *arguments: Any) -> Any:
        """numba would jump to address 0."""
        raise TypeError(f"{self.py_func.__name__} is for compiled callers (tonnage.cache.compiled.inner)")


def _once(made: Function) -> Function:
    """Compiled for the types of its arguments: numba compiles a callee again for each constant that a caller
    hands it, and for the 0 that a loop begins with (types/functions.py, 0.65)."""
    if isinstance(made, CPUDispatcher):
        template = made.get_call_template
        made.get_call_template = lambda given, named: template(tuple(map(types.unliteral, given)), named)
    return made


def compiled_apart(function: Function) -> Function:
    """Return ``function`` compiled for another thread: it may allocate, and runs without the interpreter's
    lock."""
    return COMPILER(function, error_model="numpy", nogil=True)
