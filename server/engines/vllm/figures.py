"""Collection of the memory measurements that vLLM's GPU workers log at start; vLLM reports them nowhere else.

A GPU worker logs five sizes: weights, memory other than weights, activation peak, CUDA graphs and KV pool. It
logs them at level INFO, rounded to 0.01 GiB (v1/worker/gpu_worker.py, 0.30 to 0.33). vLLM calls `watch` in each
of its processes (entry point group `vllm.general_plugins`). The measurements are stored in a folder that the
first process creates and removes when it ends. Workers on other machines, and workers that do not log, are not
measured.
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

# Environment variable with the path of the folder for measurements; the processes that vLLM starts inherit it.
FOLDER = "TONNAGE_VLLM_FIGURES"

_WORDS = ("GiB", "KV cache size")


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory measurements of one GPU, in bytes, from the logs of vLLM's workers.

    Each measurement is the maximum over the workers that logged it, or None if no worker did.
    """

    weights: int | None = None
    framework: int | None = None
    activations: int | None = None
    cuda_graphs: int | None = None


def watch() -> None:
    """Install a log handler that collects the memory measurements that this vLLM process logs.

    Further calls change nothing.
    """
    if FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="tonnage-vllm-")
        os.environ[FOLDER] = folder
        atexit.register(_take_away, folder, os.getpid())
    log = logging.getLogger("vllm")
    if not any(isinstance(handler, _Listener) for handler in log.handlers):
        log.addHandler(_Listener(Path(os.environ[FOLDER])))


def read() -> WorkerMemory:
    """Return the memory measurements that vLLM's workers have logged so far."""
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
    """Delete the folder of measurements, unless this process is a fork of its creator `owner` (a pid)."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class _Listener(logging.Handler):
    """A log handler that stores the memory measurements of one process in a JSON file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.INFO)
        self._file = folder / f"{os.getpid()}.json"
        self._figures = LogFigures()

    def emit(self, record: logging.LogRecord) -> None:
        """Read the measurements from one log record, and write them to the file if they changed."""
        try:
            text = record.getMessage()
            if not any(word in text for word in _WORDS):
                return  # most log lines, such as request logs, have no measurements
            before = dict(self._figures.figures)
            read_line(text, self._figures)
            if self._figures.figures != before:
                # Call `settle` on a copy, because it changes measurements in place. It is called again after
                # each log line with a new measurement, and would change the original a second time.
                settled = deepcopy(self._figures)
                settle(settled)
                beside = self._file.with_suffix(".new")
                beside.write_text(json.dumps(settled.figures))
                beside.replace(self._file)  # atomic, so that a reader never sees half a file
        except Exception:  # an unexpected log line or a full disk must not stop vLLM
            self.handleError(record)
