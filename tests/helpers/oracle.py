"""What libraries of a fixed version say, stored: `make test` reads it, `make test-oracles` asks them again.

tests/data/oracles/NAME.json holds the versions that were asked and for each case a digest of what was asked and
the library's own answer, never ours. TONNAGE_ORACLES=compare asks the library and fails where the file says
something else; TONNAGE_ORACLES=write (one worker) writes what it says.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "oracles"
# The stored answers are of a CPU with AVX512-BF16, where vLLM keeps some recurrent states in float32. They
# need no kernels, so any CPU gives them when vLLM is told so (platforms/cpu.py, 0.32).
STORED_CPU = """
import runpy, sys, torch
torch.cpu._is_avx512_bf16_supported = lambda: True
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
AGAIN = "make test-oracles TONNAGE_ORACLES=write asks again"


class Oracle:
    """The stored reference answers of one test file.

    ``libraries`` are the installed packages that gave the answers. ``others`` maps packages that are unpacked
    outside the environment to their versions.
    """

    def __init__(self, name: str, *libraries: str, **others: str) -> None:
        self._path = FOLDER / f"{name}.json"
        self._libraries = libraries
        self._others = others
        self._mode = os.environ.get("TONNAGE_ORACLES", "read")
        assert self._mode in ("read", "compare", "write"), self._mode

    def says(self, case: str, inputs: Any, ask: Callable[[], Any]) -> Any:
        """Return the library's stored answer to ``case`` as decoded JSON.

        ``inputs`` is everything that determines the answer; ``ask`` calls the library.
        """
        asked = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
        if self._mode == "write":
            self._write(case, {"inputs": asked, "says": ask()})
        stored = self._stored()
        found = stored["cases"].get(case)
        assert found is not None, f"{self._path.name} has no {case!r}: {AGAIN}"
        assert found["inputs"] == asked, f"{case!r} of {self._path.name} was asked of other inputs: {AGAIN}"
        if self._mode == "compare":
            assert stored["libraries"] == self._versions(), AGAIN
            assert json.loads(json.dumps(ask())) == found["says"], AGAIN
        return found["says"]

    def _stored(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {"cases": {}}
        return found

    def _versions(self) -> dict[str, str]:
        return {name: version(name).partition("+")[0] for name in self._libraries} | self._others

    def _write(self, case: str, answer: dict[str, Any]) -> None:
        stored = {"libraries": self._versions(), "cases": {**self._stored()["cases"], case: answer}}
        FOLDER.mkdir(exist_ok=True)
        cases = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(stored["cases"].items()))
        libraries = json.dumps(stored["libraries"])
        self._path.write_text(f'{{"libraries": {libraries},\n "cases": {{\n{cases}\n }}}}\n')


def vllm_says(script: Path, folders: list[str]) -> list[dict[str, Any]]:
    """Return the results that ``script`` prints for each folder as lines ``RESULT {"folder": ...}``.

    One process serves all folders, because importing vLLM takes longer than any case.
    """
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_CPU_KVCACHE_SPACE"}
    done = subprocess.run(
        [sys.executable, "-c", STORED_CPU, str(script), *folders], capture_output=True, text=True, timeout=600,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
            found[result.pop("folder")] = result
    assert len(found) == len(folders), done.stderr[-2000:]
    return [found[folder] for folder in folders]
