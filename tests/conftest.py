"""What all tests share: one compute thread a process, and how two workers divide the files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

# Threads of two workers that wait for each other on two cores cost more than they bring. The servers that tests
# start inherit this; numba keeps its threads (the hf engine takes as many of them as OpenMP has).
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# vLLM would bind each engine's only thread to the same core (platforms/cpu.py, 0.32).
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# A file is one worker's, with its servers. These are handed out first, the longest before the others; a row of
# several is one worker's too.
UNITS: tuple[tuple[str, ...], ...] = (
    ("tests/server/test_fields_honoured.py",),
    ("tests/server/test_both_engines.py",),
    ("tests/server/test_cold_start.py",),
    ("tests/server/test_cli.py",),
    ("tests/server/test_hf_engine.py",),
    ("tests/server/test_demo_model.py",),
)
_UNIT_OF = {file: unit for unit in UNITS for file in unit}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {file: place for place, file in enumerate(_UNIT_OF)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Before the workers start: the demo model, and the code that both would compile."""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in (_MODEL, _MANAGER, _KERNELS)]
    if any(process.wait() for process in processes):
        raise pytest.UsageError("the demo model or the compiled code could not be made (see above)")


_MODEL = "from tonnage.server.demo.model import ensure_demo; ensure_demo()"
_KERNELS = "from tonnage.server.engines.hf.kernels.warm import compile_all; compile_all()"
_MANAGER = """
from tonnage.cache.warm import compile_manager
from tonnage.planner.layout import KVGroup, KVLayout
full, sliding = KVGroup("full", (0,)), KVGroup("sliding", (1,), window=32)
for groups in ((full,), (full, sliding)):
    compile_manager(KVLayout(groups, 16, 1, 1, 8, "float32", 4))
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadscope`` by the units above."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            unit: Sequence[str] = _UNIT_OF.get(file, (file,))
            return unit[0]

    config.option.loadscopereorder = False
    return Units(config, log)
