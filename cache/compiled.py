"""The numba compiler of the block manager's hot loops, with the machine code kept on disk.

Loops over every block of every request (hashing, matching, publishing, releasing, evicting) are plain Python
over arrays of ints. numba compiles them. With NUMBA_DISABLE_JIT=1 the same source runs uncompiled, and the
tests compare both. The kernels of the HF engine use the same `Compiler`.

Machine code that was compiled at installation (`tonnage.cache.ahead`) is read first. Without it, compiling
takes some seconds, once per machine and version. The result is kept in the user's cache directory
(XDG_CACHE_HOME or ~/.cache; NUMBA_CACHE_DIR moves it). If nothing can be written there, every start compiles
again.

Each version of the sources and each type of processor has its own folder. When a new folder is made, folders
that no process has used for a month are removed. `tonnage plan` never imports this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import xxhash
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.registry import CPUDispatcher, cpu_target

from tonnage.cache import ahead
from tonnage.cache.ahead import AheadOrKept, Archive

log = logging.getLogger("tonnage.cache")

Function = TypeVar("Function", bound=Callable[..., Any])

_UNUSED_SECONDS = 30 * 86_400


class Compiler:
    """A numba compiler for the Python modules below one folder, with the machine code kept on disk.

    The folder of machine code is named by a digest of all these modules. numba itself checks only whether a
    function's own file has changed, not the files of the functions and constants compiled into it.

    Attributes:
        folder: Folder of the machine code. None: nothing is kept, because no folder is writable or
            NUMBA_DISABLE_JIT is set.
        kept: Whether the machine code of every function compiled so far is in ``folder``.
        archive: Machine code that was compiled ahead of time from the same sources.
        made: The functions that are compiled or still to be compiled.
    """

    def __init__(self, sources: Path) -> None:
        # numba keeps machine code under the path from which the source was imported (core/caching.py, 0.65).
        # The path is therefore part of the digest. numba reads only code that was made for the same processor,
        # and machines with other processors may share a home directory. So the processor is part of it too.
        target = cpu_target.target_context.codegen().magic_tuple()
        digest = xxhash.xxh3_64(f"{numba.__version__} {target} {sources.absolute()}".encode())
        content = xxhash.xxh3_64()
        # ahead.py defines the CPU instruction sets that machine code is compiled for ahead of time. The text of
        # ahead.py is therefore part of the digest too.
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
        """Return whether the set of functions named ``note`` is compiled.

        They are compiled if the folder of machine code has them, or if the archive of machine code that was
        compiled ahead of time has them.
        """
        return note in self.archive or (self.folder is not None and (self.folder / note).exists())

    def note(self, note: str) -> None:
        """Record, by an empty file ``note``, that the folder has the machine code of a set of functions."""
        if self.folder is not None and self.kept:
            with contextlib.suppress(OSError):  # if the file cannot be written, every start compiles again
                (self.folder / note).touch()

    def progress(self) -> tuple[int, int]:
        """Return two numbers for a progress display: the functions compiled so far, and all functions."""
        return sum(bool(each.overloads) for each in self.made), len(self.made)

    def __call__(self, function: Function, **options: Any) -> Function:
        """Return ``function`` wrapped by numba, with numba's options; it is compiled at its first call.

        numba's wrapper for calls from C is left out: it takes a seventh of the compile time and has no caller.
        """
        dispatcher = numba.njit(no_cfunc_wrapper=True, **options)(function)
        # With NUMBA_DISABLE_JIT the dispatcher is a plain function. The assignment to `_cache` is what numba's
        # option cache=True does (core/dispatcher.py, 0.65).
        if isinstance(dispatcher, CPUDispatcher):
            dispatcher._cache = AheadOrKept(function, self.archive, self._in_folder(function))
            self.made.append(dispatcher)
        return cast(Function, dispatcher)

    def _in_folder(self, function: Callable[..., Any]) -> _Kept | None:
        if self.folder is None:
            return None
        before = numba.config.CACHE_DIR
        # numba reads the setting CACHE_DIR when it creates a function's cache.
        numba.config.CACHE_DIR = str(self.folder)
        try:
            return _Kept(function, self)
        except RuntimeError as error:  # numba finds no writable cache folder
            self.lost(error)
            return None
        finally:
            numba.config.CACHE_DIR = before

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder of machine code against writes of other processes, as a context manager.

        numba reads, changes and writes a function's index without a lock (IndexDataCacheFile.save of
        core/caching.py, 0.65). Of two processes that compile at the same time, one could lose its code. A later
        start would then compile it in the engine process, which takes memory that is not planned.
        """
        assert self.folder is not None
        with (self.folder / "lock").open("w") as lock:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def lost(self, error: Exception) -> None:
        """Log once that machine code could not be written to disk; the program continues."""
        if self.kept:
            log.warning("cannot keep compiled code in %s (%s): every start compiles again", self.folder, error)
        self.kept = False


class _InFolder(CompileResultCacheImpl):  # type: ignore[misc]
    """A numba cache of machine code that uses only one given folder.

    By default numba would fall back to __pycache__, whose files do not change when an imported module changes.
    """

    _locator_classes = (UserProvidedCacheLocator,)


class _Kept(FunctionCache):  # type: ignore[misc]
    """A numba cache of one function's machine code, in which a disk error only costs compile time."""

    _impl_class = _InFolder

    def __init__(self, function: Callable[..., Any], compiler: Compiler) -> None:
        super().__init__(function)
        self._compiler = compiler

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except OSError:  # unreadable machine code is compiled again
            return None

    def save_overload(self, *arguments: Any) -> None:
        try:
            with self._compiler.locked():
                super().save_overload(*arguments)
        except OSError as error:
            self._compiler.lost(error)


def _cache_folder() -> Path | None:
    """Return the user's cache directory for machine code, or None if the user has no home directory."""
    if own := numba.config.CACHE_DIR:
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tonnage"
    try:
        return Path.home() / ".cache" / "tonnage"
    # HOME is not set and passwd has no entry for the user id, as in a container under an arbitrary user id.
    except RuntimeError:
        return None


def _used(folder: Path | None) -> bool:
    """Create a machine-code folder if needed, set its time of last use, and return whether it is writable."""
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
    """Remove the folders of machine code that no process has opened for 30 days.

    A process that still runs with such a folder loses nothing: its code is in memory, and numba creates the
    folder again for later compilations.
    """
    for folder in cache.glob("compiled-*"):
        with contextlib.suppress(OSError):
            unused = time.time() - folder.stat().st_mtime > _UNUSED_SECONDS
            if unused and re.fullmatch("compiled-[0-9a-f]{16}", folder.name):
                shutil.rmtree(folder, ignore_errors=True)


COMPILER = Compiler(Path(__file__).parent)


def compiled(function: Function) -> Function:
    """Compile a function of this package whose arguments are numbers, arrays or named tuples of arrays.

    numba's reference counting of arrays is switched off. Such functions do not need it, because they allocate
    nothing, and its atomic operations take a third of the time of the inner loops.
    """
    return _once(COMPILER(function, error_model="numpy", _nrt=False))


def inner(function: Function) -> Function:
    """Compile a function like `compiled`, for calls from compiled functions only.

    The result has no wrapper for calls from Python. Such a wrapper unpacks the named tuple of all arrays and
    costs a quarter of the compile time.
    """
    made = _once(COMPILER(function, error_model="numpy", _nrt=False, no_cpython_wrapper=True))
    if isinstance(made, CPUDispatcher):
        made.__class__ = _Inner
    return made


def inlined(function: Function) -> Function:
    """Mark a function to be copied into each compiled caller, for code that runs once per block.

    Without inlining, a call passes all arrays of the block manager by value, which costs more than the
    function's body.
    """
    return cast(Function, numba.njit(error_model="numpy", _nrt=False, inline="always")(function))


class _Inner(CPUDispatcher):  # type: ignore[misc]
    """A compiled function that can be called only from compiled functions."""

    def __call__(self, *arguments: Any) -> Any:
        """Raise TypeError for a call from Python, because numba would jump to address 0."""
        raise TypeError(
            f"{self.py_func.__name__} can be called only from compiled code (tonnage.cache.compiled.inner)"
        )


def _once(made: Function) -> Function:
    """Make numba compile a function once per argument type instead of once per constant argument.

    By default numba compiles a callee again for each literal that a caller passes, and for the 0 that a loop
    starts with (types/functions.py, 0.65).
    """
    if isinstance(made, CPUDispatcher):
        template = made.get_call_template
        made.get_call_template = lambda given, named: template(tuple(map(types.unliteral, given)), named)
    return made


def compiled_apart(function: Function) -> Function:
    """Compile a function for calls from another thread: it releases the interpreter's lock and may allocate."""
    return COMPILER(function, error_model="numpy", nogil=True)
