"""Hub ids: the local hub cache first, then the hub itself by range request.

Only config.json, the index and the headers of safetensors files are fetched; weights stay where they are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tonnage.planner.errors import ModelNotFound
from tonnage.planner.model.tensor import HeaderTensor


def hub_cache() -> Path:
    """The folder huggingface_hub keeps snapshots in (its own rules, constants.py, 1.0)."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "huggingface" / "hub"


def cached_snapshot(model: str) -> Path | None:
    """The snapshot of ``main`` in the local cache, if it has a config.json."""
    folder = hub_cache() / ("models--" + model.replace("/", "--"))
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and (snapshot / "config.json").exists() else None


def fetch(model: str) -> tuple[dict[str, Any], tuple[HeaderTensor, ...] | None]:
    """config.json, and the headers of its safetensors files where there are any. Raises ModelNotFound naming
    what was tried and what to do."""
    hint = "give a local folder with config.json, or a name the hub knows"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelNotFound(
            f"{model} is not in the local hub cache and HF_HUB_OFFLINE is set", field="model", hint=hint
        )
    from tonnage.planner.headers.remote import Remote, fetch_config, fetch_tensors

    remote = Remote(model)
    try:
        config = fetch_config(remote)
        if config is None:
            raise ModelNotFound("there is no config.json", field="model")
        return config, fetch_tensors(remote)
    except ModelNotFound as error:
        raise ModelNotFound(f"{model}: {error.message}", field="model", hint=hint) from None
