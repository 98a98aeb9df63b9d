"""The steps of the check in their order, and the child process that runs them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import attention, engine, formats, hardware, memory, out_of_memory, vllm_start
from .models import Target
from .rows import Pipe, Row

STEPS: dict[str, Callable[[Target], Iterator[Row]]] = {
    "device": hardware.run,
    "first-step": engine.first_step,
    "attention": attention.run,
    "memory": memory.run,
    "host": memory.host,
    "engine": engine.run,
    "out-of-memory": out_of_memory.run,
    "formats": formats.run,
    "vllm": vllm_start.run,
}


def child(names: list[str], device: str, folder: Path, model: Path | None) -> None:
    """Run steps in this process and report each row on standard output; other output goes to standard error."""
    pipe = Pipe(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else None
    target = Target(device, folder, total, model)
    for name in names:
        pipe.send(begin=name)
        try:
            for row in STEPS[name](target):
                pipe.row(row)
        except Exception as error:
            traceback.print_exc()
            pipe.send(failed=f"{type(error).__name__}: {error}"[:500])
            # After an error on a GPU its context may be unusable, so the parent starts a new process.
            return
        pipe.send(end=name)
