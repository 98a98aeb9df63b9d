"""Machine code compiled ahead of time: a start loads it only where sources, versions and CPU are the same."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from numba.core.serialize import dumps

from tonnage.cache import ahead
from tonnage.cache.compiled import Compiler
from tonnage.server.engines.hf import ahead as hf_ahead
from tonnage.server.engines.hf.ahead import Compiled, collect, write

SOURCE = "def one(x):\n    return x + 1\n"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Yield a folder with one module; archives and the cache of machine code go into empty folders."""
    if numba.config.DISABLE_JIT:
        pytest.skip("without numba's compiler there is no machine code")
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "ahead_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(ahead, "FOLDER", tmp_path / "machine_code")
    monkeypatch.setattr(ahead, "level_here", lambda: ahead.LEVELS[-1])  # on any processor
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    return folder


def function() -> Callable[[int], int]:
    module: ModuleType = importlib.reload(importlib.import_module("ahead_module"))
    one: Callable[[int], int] = module.one
    return one


def archived(folder: Path) -> Compiled:
    """Compile `SOURCE` for an int64 argument and write its archive."""
    compiler = Compiler(folder)
    one = compiler(function())
    compiler.archive.collect()
    assert one(1) == 2
    found = Compiled(compiler.archive.name, {**(compiler.archive.collected or {}), "all": b""}, [])
    assert len(found.members) == 2
    write(ahead.LEVELS[-1], [found])
    return found


def hits(compiler: Compiler) -> int:
    """Return the number of loads from numba's cache when one function is called."""
    one = compiler(function())
    assert one(41) == 42
    return sum(one.stats.cache_hits.values())  # type: ignore[attr-defined]


def test_compiler_loads_code_from_the_precompiled_archive_instead_of_compiling(
    sources: Path, tmp_path: Path
) -> None:
    archived(sources)
    compiler = Compiler(sources)
    assert "all" in compiler
    assert "more" not in compiler
    assert hits(compiler) == 1
    assert not list(tmp_path.rglob("*.nbc"))


def test_precompiled_archive_is_used_after_moving_the_sources_but_not_after_changing_them(
    sources: Path, tmp_path: Path
) -> None:
    archived(sources)
    sources.rename(tmp_path / "moved")
    moved = Compiler(tmp_path / "moved")
    assert "all" in moved
    (tmp_path / "moved" / "ahead_module.py").write_text(SOURCE.replace("1", "2"))
    assert "all" not in Compiler(tmp_path / "moved")


def test_precompiled_archive_of_another_instruction_set_is_not_used(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(sources)
    text = Path(ahead.__file__).read_text()
    fewer = tmp_path / "ahead.py"
    fewer.write_text(text.replace('"fma", ', ""))
    assert fewer.read_text() != text
    kept = Compiler(sources).folder
    monkeypatch.setattr(ahead, "__file__", str(fewer))
    changed = Compiler(sources)
    assert "all" not in changed
    assert changed.folder != kept


@pytest.mark.parametrize(
    ("lacks", "level"),
    [
        ((), "x86-64-v4-bf16"),
        (("avx512bf16",), "x86-64-v4"),
        (("avx512bf16", "avx512vl"), "x86-64-v3"),
        (("avx512bf16", "avx512vl", "fma"), None),
    ],
)
def test_highest_instruction_set_level_that_the_cpu_supports_is_chosen(
    lacks: tuple[str, ...], level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = {name: name not in lacks for name in ahead.LEVELS[0].needs}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    found = ahead.level_here()
    assert (found and found.name) == level


VECTORS = """
def dot(a, b):
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    return total
"""
FOR_ANOTHER = """
import sys
from pathlib import Path
import numpy as np
from ahead_vectors import dot
from tonnage.cache import ahead
from tonnage.cache.compiled import Compiler
sources, ahead.FOLDER = map(Path, sys.argv[1:3])
(level,) = (level for level in ahead.LEVELS if level.name == sys.argv[3])
compiler = Compiler(sources)
compiler.archive.collect()
dot = compiler(dot, fastmath=True)
dot(np.ones(9), np.ones(9))
assert "ymm" in "".join(dot.inspect_asm().values())
ahead.FOLDER.mkdir()
ahead.write(level.path, {compiler.archive.name: compiler.archive.collected})
"""


@pytest.mark.parametrize("level", ahead.LEVELS, ids=lambda level: level.name)
def test_code_precompiled_for_a_lower_instruction_set_level_runs_on_this_cpu(
    level: ahead.Level, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compile vector instructions in a process with a configured instruction level; load and run them here."""
    features = llvm.get_host_cpu_features()
    if not all(features.get(name) for name in level.needs):
        pytest.skip("not on this processor")
    (sources / "ahead_vectors.py").write_text(VECTORS)
    path = os.pathsep.join(filter(None, [str(sources), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", FOR_ANOTHER, sources, ahead.FOLDER, level.name],
        env=os.environ | level.environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(ahead, "level_here", lambda: level)
    dot = Compiler(sources)(importlib.import_module("ahead_vectors").dot, fastmath=True)
    numbers = np.arange(999.0)
    assert dot(numbers, numbers) == float(numbers @ numbers)
    assert sum(dot.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("name", ["CPU_NAME", "CPU_FEATURES", "ENABLE_AVX"])
def test_precompiled_archive_is_not_used_when_numba_is_configured_for_another_processor(
    name: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(sources)
    monkeypatch.setattr(numba.config, name, 0 if name == "ENABLE_AVX" else "generic")
    assert "all" not in Compiler(sources)


def test_functions_of_a_damaged_precompiled_archive_are_compiled_again(sources: Path) -> None:
    archived(sources)
    path = ahead.LEVELS[-1].path
    whole = path.read_bytes()
    at = 200  # inside the first member
    path.write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
    assert hits(Compiler(sources)) == 0
    path.write_bytes(whole[: len(whole) // 2])
    compiler = Compiler(sources)
    assert "all" not in compiler


def test_compiling_a_function_for_a_signature_does_not_call_it(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(sources)
    module = importlib.import_module("ahead_module")
    one = compiler(function())
    monkeypatch.setattr(module, "one", one)
    types = (numba.types.float64,)
    found = collect(compiler, [], [("ahead_module", "one", types)])
    assert found.signatures == [("ahead_module", "one", types)]
    assert [member.partition("-")[0] for member in found.members] == ["ahead_module.one"]


def test_ahead_of_time_compilation_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compile ahead in a process that only has to import, and in one that fails."""
    nothing = tmp_path / "nothing"
    nothing.write_bytes(dumps(("", {}, [])))
    monkeypatch.setattr(hf_ahead, "SAY_SECONDS", 0.1)
    with ThreadPoolExecutor(2) as pool:
        processes = hf_ahead._Processes(tmp_path, pool)
        (made,) = processes.results([processes.start(ahead.LEVELS[-1], "manager", nothing)])
        assert hf_ahead.read(made).signatures == []
        with pytest.raises(subprocess.CalledProcessError):
            processes.results([processes.start(ahead.LEVELS[-1], "manager", tmp_path / "missing")])
    said = capfd.readouterr().err.splitlines()
    assert re.match(r"compiling, \d+ s so far: ", said[0])
    assert any(line.startswith("compiled for x86-64-v3: manager, ") for line in said)
