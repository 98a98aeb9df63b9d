"""Setup for all tests: one compute thread per process, and the division of files between two workers."""

from __future__ import annotations

import gc
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

# 5,000 tests and their imported libraries stay alive: garbage collection took 5 of 20 s of a collection.
# pytest_collection_finish ends it.
gc.disable()

# Threads of two workers that wait for each other on two cores cost more than they bring. The servers that tests
# start inherit this; numba keeps its threads (the hf engine takes as many of them as OpenMP has).
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# vLLM would bind each engine's only thread to the same core (platforms/cpu.py, 0.32).
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Where the CPU has AMX, torch and vLLM do not see it, here and in what tests start.
if "amx_tile" in Path("/proc/cpuinfo").read_text():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    _without_amx = str(Path(__file__).parent / "helpers" / "without_amx")
    os.environ["PYTHONPATH"] = os.pathsep.join([_without_amx, *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_path(f"{_without_amx}/sitecustomize.py")
# Where a test wants two threads, they wait for each other asleep: one that spins keeps the other from its core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest.register_assert_rewrite("honoured", "called")  # helpers that check

# A file is one worker's, with its servers. First the one that compiles what later ones load, beside it files
# that need nothing of it, then the longest.
FIRST = "tests/server/test_cold_start.py"
MEANWHILE = "tests/planner/"
LONGEST = (
    "tests/server/vllm/served/",
    "tests/server/vllm/test_embeddings.py",
    "tests/server/test_both_engines.py",
    "tests/server/test_hf_engine.py",
    "tests/docs/test_served.py",
    "tests/server/test_cli.py",
    "tests/server/test_demo_model.py",
    "tests/server/test_fields_honoured.py",
    "tests/server/test_hf_families.py",
    "tests/server/test_hf_formats.py",
    "tests/server/test_gpu_check.py",
    "tests/server/test_one_step_loop.py",
    "tests/server/test_supervision.py",
    "tests/server/test_hf_runner.py",
    "tests/security/test_hung_engine.py",
    "tests/security/test_planner_input.py",
    "tests/deploy/test_queries_live.py",
    "tests/server/test_hf_adjust.py",
    "tests/server/test_schema_generated.py",
    "tests/server/test_hf_kv_dtype.py",
    "tests/cache/test_cache_random_operations.py",
    "tests/server/test_hf_http.py",
    "tests/server/test_hf_profile.py",
)


TOGETHER = ("tests/server/vllm/served/",)  # folders whose files share their servers


def _file(nodeid: str) -> str:
    """Return the file of a test, or the folder whose tests must run on one worker."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {file: place for place, file in enumerate(LONGEST, start=2)}

    def place(item: pytest.Item) -> int:
        file = _file(item.nodeid)
        return 0 if file == FIRST else 1 if file.startswith(MEANWHILE) else places.get(file, len(places) + 2)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind reports objects that are uncollected at exit


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Create the demo model before the workers start, which would otherwise both convert it."""
    if "TONNAGE_PYTHON" in os.environ:
        return  # an environment without tonnage (tests/clients)
    from tonnage.server.demo.model import ensure_demo

    ensure_demo()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of ``--dist loadscope`` by files, in the order of the lists above."""
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _file(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)
