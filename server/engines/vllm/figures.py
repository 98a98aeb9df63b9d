"""What vLLM's workers say of their memory while they start: nobody else measures it, so their log is read.

A GPU worker logs at level INFO what its weights took, what it consumed beside them, its activation peak, its
CUDA graphs and what is left for the pool (v1/worker/gpu_worker.py, 0.30 to 0.33), to a hundredth of a GiB.
vLLM calls `watch` in each of its processes (entry point group ``vllm.general_plugins``); the figures lie in a
folder that the first of them makes and takes away again. Workers on other machines, and those that log
nothing, say nothing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.vllm.log import read_line, settle

# Names the folder to the processes that vLLM starts, which inherit it.
FOLDER = "TONNAGE_VLLM_FIGURES"

_WORDS = ("GiB", "KV cache size")


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Bytes on one device, the most of any worker that told; None: none did."""

    weights: int | None = None
    framework: int | None = None
    activations: int | None = None
    cuda_graphs: int | None = None


def watch() -> None:
    """Listen to vLLM's log in this process. Called once or more in each."""
    if FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="tonnage-vllm-")
        os.environ[FOLDER] = folder
        atexit.register(_take_away, folder, os.getpid())
    log = logging.getLogger("vllm")
    if not any(isinstance(handler, _Listener) for handler in log.handlers):
        log.addHandler(_Listener(Path(os.environ[FOLDER])))


def read() -> WorkerMemory:
    """What the workers have told so far."""
    found: dict[str, float] = {}
    folder = os.environ.get(FOLDER)
    for file in Path(folder).glob("*.json") if folder else ():
        figures = json.loads(file.read_text())
        for name, value in figures.items():
            found[name] = max(value, found.get(name, 0.0))

    def size(name: str) -> int | None:
        return max(0, int(found[name])) if name in found else None

    return WorkerMemory(
        size("weights_bytes"), size("non_torch_bytes"), size("activation_bytes"), size("cuda_graph_bytes")
    )


def _take_away(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


class _Listener(logging.Handler):
    """Keeps the figures of one process in a file of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.INFO)
        self._file = folder / f"{os.getpid()}.json"
        self._figures = LogFigures()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if not any(word in text for word in _WORDS):
                return  # a log of every request is no business of ours
            before = dict(self._figures.figures)
            read_line(text, self._figures)
            if self._figures.figures != before:
                settled = deepcopy(self._figures)  # what follows is taken from what was said, once
                settle(settled)
                beside = self._file.with_suffix(".new")
                beside.write_text(json.dumps(settled.figures))
                beside.replace(self._file)  # who reads sees all of it or nothing
        except Exception:  # a line of a log, or a full disk, is no reason to fail
            self.handleError(record)
