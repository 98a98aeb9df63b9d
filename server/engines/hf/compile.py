"""Compilation of the HF engine's numba kernels in separate processes, before the weights are loaded.

numba's compiler does not free its memory. Code that the engine process compiles itself takes about 190 MB more
than code that it reads from disk (demo model). So without separate processes the memory plan would be wrong at
the first start.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from tonnage.cache.admission import Policy
from tonnage.cache.compiled import COMPILER, Compiler
from tonnage.cache.warm import compile_manager
from tonnage.planner.model.layout import KVLayout
from tonnage.server.engines.heap import bound_heap
from tonnage.server.engines.hf.kernels import COMPILER as KERNELS

SAY_SECONDS = 5.0  # seconds between two progress lines


@dataclass(frozen=True, slots=True)
class Part:
    """The numba code that one process compiles: the block manager for a KV layout, or the CPU kernels.

    Attributes:
        layout: KV layout that the block manager is compiled for; None for the CPU kernels.
        policy: admission policy that the block manager is compiled for; None for a manager without a policy.
    """

    layout: KVLayout | None
    policy: Policy | None = None

    @property
    def compiler(self) -> Compiler:
        """The `Compiler` in whose cache the machine code of the block manager or the kernels is stored."""
        return KERNELS if self.layout is None else COMPILER

    @property
    def note(self) -> str:
        """The name of this code in the `Compiler`'s cache.

        It contains everything that the functions and their argument types depend on.
        """
        if self.layout is None:
            return "kernels"
        kinds = sorted({group.kind for group in self.layout.groups})
        return "-".join(["manager", *kinds, self.policy.mode if self.policy else "sum"])

    def load(self) -> None:
        """Load the machine code of the block manager or the kernels from disk; compile it if there is none."""
        if self.layout is not None:
            compile_manager(self.layout, self.policy)
            return
        # Imported here, because `warm` imports torch, which the block manager does not need.
        from tonnage.server.engines.hf.kernels.warm import compile_all

        compile_all()


class Preparation:
    """The machine code of the block manager and, with ``kernels``, of the CPU kernels; in memory after `load`.

    Each part that is not on disk is compiled in a process of its own. The processes run one after the other,
    because two at the same time would need more memory than the plan has for a first start. The constructor
    starts the first process, and `load` starts the next ones. Progress is printed on stderr.
    """

    def __init__(self, layout: KVLayout, policy: Policy | None, *, kernels: bool) -> None:
        self._parts = [Part(None)] if kernels else []
        self._parts.append(Part(layout, policy))
        self._begun = time.monotonic()
        self._missing = [part for part in self._parts if part.note not in part.compiler]
        self._first: _Compilation | None = None
        if self._missing:
            print("compiling for this machine, once", file=sys.stderr, flush=True)
            self._first = _Compilation(self._missing[0])

    def load(self) -> None:
        """Load the machine code of block manager and kernels from disk; first compile what is not on disk.

        Loading takes half a second.
        """
        for number, part in enumerate(self._missing, 1):
            compilation = self._first if number == 1 and self._first else _Compilation(part)
            self._finish(compilation, f"part {number} of {len(self._missing)}")
        for part in self._parts:
            part.load()

    def _finish(self, compilation: _Compilation, name: str) -> None:
        """Wait until ``compilation`` ends; print its progress on stderr under the name ``name``."""
        said = self._begun
        while compilation.works():
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                so_far = f"{compilation.done} of {compilation.of} functions in {said - self._begun:.0f} s"
                print(f"compiling for this machine, once: {name}, {so_far}", file=sys.stderr, flush=True)
            compilation.process.join(SAY_SECONDS / 10)
        compilation.end()


class _Compilation:
    """A child process that compiles the numba code of ``part``, either the block manager or the CPU kernels.

    Its latest progress report said that ``done`` functions are compiled, of ``of`` functions in total.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self.done, self.of = 0, 0
        context = get_context("spawn")
        self._progress, told = context.Pipe(duplex=False)
        self.process: SpawnProcess = context.Process(target=_compile, args=(part, told), daemon=True)
        self.process.start()
        told.close()

    def works(self) -> bool:
        """Receive pending progress reports; return whether the process is still running."""
        with contextlib.suppress(EOFError):
            while self._progress.poll():
                self.done, self.of = self._progress.recv()
        return self.process.is_alive()

    def end(self) -> None:
        """Wait until the process ends, and record its code as compiled if the process succeeded."""
        self.process.join()
        self._progress.close()
        if self.process.exitcode == 0:
            self._part.compiler.note(self._part.note)


def _compile(part: Part, told: Connection) -> None:
    """Compile the numba code of ``part`` in this process, and store the machine code on disk.

    The process exits with status 1 if the machine code could not be stored. ``told`` is the pipe for progress
    reports to the parent process.
    """
    # The compiler creates and drops millions of objects, and each garbage collection also visits the permanent
    # imports. So the garbage collector took 7 of 35 s of processor time. With fewer collections it takes 1 s,
    # and peak memory is 30 MB higher.
    gc.freeze()
    gc.set_threshold(50_000)
    bound_heap()  # return freed memory to the kernel: the engine process takes memory at the same time
    threading.Thread(target=_tell, args=(part.compiler, told), daemon=True).start()
    part.load()
    if not part.compiler.kept:
        sys.exit(1)


def _tell(compiler: Compiler, told: Connection) -> None:
    """Send the compiler's progress to the parent process twice a second; exit if the parent has ended."""
    try:
        while True:
            told.send(compiler.progress())
            time.sleep(0.5)
    except OSError:  # The pipe is closed: the parent has ended or was killed.
        os._exit(1)
