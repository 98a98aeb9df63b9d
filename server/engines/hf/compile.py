"""Machine code before weights: compile in a process of its own, then load from disk.

A compiler gives no memory back: compiled in the engine process, the same code costs some 190 MB more than
read from disk (demo model), and the plan would be right at every start but the first.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
from pathlib import Path

from tonnage.cache.admission import Policy
from tonnage.cache.compiled import COMPILER
from tonnage.cache.warm import compile_manager
from tonnage.planner.model.layout import KVLayout
from tonnage.server.engines.hf.kernels import COMPILER as KERNELS


def prepare(layout: KVLayout, policy: Policy | None, *, kernels: bool) -> None:
    """Have the code of the block manager, and with ``kernels`` that of the CPU's bfloat16 kernels, in memory.

    Half a second; some 30 once per machine and version, with a line on stderr that says so.
    """
    notes = _notes(layout, policy, kernels)
    if not all(note.exists() for note in notes):
        print("compiling for this machine (once, about 30 s)", file=sys.stderr, flush=True)
        process = multiprocessing.get_context("spawn").Process(
            target=_compile, args=(layout, policy, kernels), daemon=True
        )
        process.start()
        process.join()
        if process.exitcode == 0:
            for note in notes:
                with contextlib.suppress(OSError):  # not to be written: it compiles at every start
                    note.touch()
    load(layout, policy, kernels)


def _compile(layout: KVLayout, policy: Policy | None, kernels: bool) -> None:
    """The process that compiles; it fails where the next one would not find all on disk."""
    # The compiler's objects come and go by the million, beside what was imported to stay: of 35 s of processor
    # time the collector took 7. Seldom, it takes 1, and the peak is 30 MB higher.
    gc.freeze()
    gc.set_threshold(50_000)
    load(layout, policy, kernels)
    if not (COMPILER.kept and (KERNELS.kept or not kernels)):
        sys.exit(1)


def load(layout: KVLayout, policy: Policy | None, kernels: bool) -> None:
    """Read it from disk, or compile what is not there."""
    if kernels:
        # Imports torch, which the rest does not need.
        from tonnage.server.engines.hf.kernels.warm import compile_all

        compile_all()
    compile_manager(layout, policy)


def _notes(layout: KVLayout, policy: Policy | None, kernels: bool) -> list[Path]:
    """Empty files beside the compiled code: this was compiled. They go when it goes."""
    # What decides which functions a manager runs, and with arguments of which types.
    what = "-".join(
        ["manager", *sorted({group.kind for group in layout.groups}), policy.mode if policy else "sum"]
    )
    notes = [] if COMPILER.folder is None else [COMPILER.folder / what]
    if kernels:
        notes += [] if KERNELS.folder is None else [KERNELS.folder / "kernels"]
    return notes
