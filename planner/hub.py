"""Hub ids: the local hub cache first, then the hub itself when huggingface_hub is installed and answers.

Only config.json and the safetensors index are fetched; weights stay where they are.
"""

from __future__ import annotations

import os
from pathlib import Path

from tonnage.planner.errors import ModelNotFound
from tonnage.planner.fields import load_config
from tonnage.planner.headers.safetensors import read_folder
from tonnage.planner.source import ModelSource

_TIMEOUT_SECONDS = 10.0  # for the hub's answer to one HEAD request


def hub_cache() -> Path:
    """The folder huggingface_hub keeps snapshots in (its own rules, constants.py, 1.0)."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "huggingface" / "hub"


def resolve_hub_id(model: str) -> ModelSource:
    """``org/name`` -> ModelSource. Raises ModelNotFound naming what was tried and what to do."""
    snapshot = cached_snapshot(model)
    if snapshot is None:
        snapshot = _fetch(model)
    complete = any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.bin"))
    tensors = read_folder(snapshot) if any(snapshot.glob("*.safetensors")) else None
    path = str(snapshot) if complete else model
    return ModelSource(model, path, load_config(snapshot / "config.json"), "hub", tensors)


def cached_snapshot(model: str) -> Path | None:
    """The snapshot of ``main`` in the local cache, if it has a config.json."""
    folder = hub_cache() / ("models--" + model.replace("/", "--"))
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and (snapshot / "config.json").exists() else None


def _fetch(model: str) -> Path:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    hint = "give a local folder with config.json, or a name the hub knows"
    if offline:
        raise ModelNotFound(
            f"{model} is not in the local hub cache and HF_HUB_OFFLINE is set", field="model", hint=hint
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ModelNotFound(
            f"{model} is not in the local hub cache and huggingface_hub is not installed",
            field="model",
            hint="pip install huggingface_hub, or " + hint,
        ) from None
    try:
        config = hf_hub_download(model, "config.json", etag_timeout=_TIMEOUT_SECONDS)
    except Exception as error:  # its error types differ between versions; all mean: not to be had
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelNotFound(f"{model} cannot be fetched: {reason[:200]}", field="model", hint=hint) from None
    return Path(config).parent
