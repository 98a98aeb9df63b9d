"""Tests of the memory figures that are read from the log lines of vLLM's GPU workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.units import GiB
from tonnage.server.engines.stats import MeasuredMemory
from tonnage.server.engines.vllm import figures
from tonnage.server.engines.vllm.figures import WorkerMemory, read, watch
from tonnage.server.observe.memory_report import measured_components

# As vLLM 0.32 words them (v1/worker/gpu_model_runner.py and gpu_worker.py).
WEIGHTS = "Model loading took %s GiB memory and %.6f seconds"
USAGE = (
    "Free memory on device (78.70/79.18 GiB) on startup. Desired GPU memory utilization is (0.92, 72.84 GiB). "
    "Actual usage is 15.61 GiB for consumed memory (weights + non-torch), 1.25 GiB for peak activation, "
    "and 0.37 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
    "`--kv-cache-memory=59000000000` (54.95 GiB) to fit into requested memory, or "
    "`--kv-cache-memory=65000000000` (60.54 GiB) to fully utilize gpu memory. "
    "Current kv cache memory in use is 55.61 GiB."
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder in which a new process of vLLM keeps its figures."""
    monkeypatch.delenv(figures.FOLDER, raising=False)
    log = logging.getLogger("vllm")
    before = [*log.handlers]
    log.handlers = [handler for handler in before if not isinstance(handler, figures._Listener)]
    level = log.level
    log.setLevel(logging.INFO)  # as vLLM does
    watch()
    yield Path(os.environ[figures.FOLDER])
    log.handlers = before
    log.setLevel(level)


def test_api_process_receives_the_memory_sizes_that_a_vllm_gpu_worker_logs(folder: Path) -> None:
    assert read() == WorkerMemory()
    log = logging.getLogger("vllm.v1.worker.gpu_worker")
    log.info(WEIGHTS, "14.96", 3.25)
    assert read() == WorkerMemory(weights=int(14.96 * GiB))
    log.info("Starting to load model %s", "a model")
    log.info(USAGE)
    told = read()
    assert told == WorkerMemory(
        int(14.96 * GiB), int(15.61 * GiB - 14.96 * GiB), int(1.25 * GiB), int(0.37 * GiB)
    )
    memory = MeasuredMemory(
        weights=told.weights, framework=told.framework, activation_peak=told.activations,
        cuda_graphs=told.cuda_graphs, kv_pool=7,
    )  # fmt: skip
    plan = make_plan("demo", Deployment(engine="vllm"))
    assert measured_components(plan, memory) == {
        "weights": told.weights, "kv_pool": 7, "activations": told.activations, "framework": told.framework,
        "cuda_graphs": told.cuda_graphs,
    }  # fmt: skip


def test_logged_estimate_of_cuda_graph_memory_is_counted_once(folder: Path) -> None:
    """Since vLLM 0.27 the printed peak includes the estimate of CUDA graphs, a component of its own."""
    log = logging.getLogger("vllm.v1.worker.gpu_worker")
    log.info(WEIGHTS, "14.96", 3.25)
    log.info("Estimated CUDA graph memory: %.2f GiB total", 0.41)
    log.info(USAGE)
    assert read() == WorkerMemory(
        int(14.96 * GiB), int(15.61 * GiB - 14.96 * GiB), int(1.25 * GiB - 0.41 * GiB), int(0.37 * GiB)
    )


def test_largest_logged_memory_size_of_several_workers_is_kept(folder: Path) -> None:
    logging.getLogger("vllm").info(WEIGHTS, "2.00", 1.0)
    (folder / "another.json").write_text('{"weights_bytes": 7e9}')
    assert read().weights == 7_000_000_000


def test_first_vllm_process_creates_the_private_folder_for_memory_sizes(folder: Path) -> None:
    watch()  # again, as vLLM does
    assert Path(os.environ[figures.FOLDER]) == folder
    assert folder.stat().st_mode & 0o077 == 0
    listeners = [h for h in logging.getLogger("vllm").handlers if isinstance(h, figures._Listener)]
    assert len(listeners) == 1


def test_deleted_folder_for_memory_sizes_does_not_break_logging(folder: Path, capfd: Any) -> None:
    folder.rmdir()
    logging.getLogger("vllm").info(WEIGHTS, "2.00", 1.0)
    assert read() == WorkerMemory()
