"""Configs and tensor headers of hub models, from the local hub cache or by HTTP range requests.

Only config.json, the index and the headers of safetensors files are fetched, no weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.planner.errors import ModelNotFound
from tonnage.planner.headers.hub import hub_cache, modelscope, modelscope_caches, offline
from tonnage.planner.headers.index import Checkpoint
from tonnage.planner.headers.names import HubModel, revision_of

if TYPE_CHECKING:
    from tonnage.planner.headers.remote import Remote  # loads an HTTP client

_HINT = "give a local folder with config.json, or a name the hub knows"


def cached_snapshot(model: HubModel) -> Path | None:
    """Return the local folder of a model's revision if the hub cache has its config.json, else None."""
    if modelscope():
        revision = revision_of(model)
        folders = modelscope_caches(model.repo, revision)[: None if revision == "master" else 1]
        return next((folder for folder in folders if (folder / "config.json").exists()), None)
    folder = hub_cache() / ("models--" + model.repo.replace("/", "--"))
    try:
        commit = (folder / "refs" / model.revision).read_text().strip()
    except OSError:
        commit = model.revision if re.fullmatch(r"[0-9a-f]{40}", model.revision) else ""
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and (snapshot / "config.json").exists() else None


def fetch(model: HubModel) -> tuple[dict[str, Any], Checkpoint]:
    """Return config.json and the tensor headers (or index) of a model, fetched from the hub.

    Raises:
        ModelNotFound: the model cannot be fetched; the message says what was tried and what to do.
    """
    if offline():
        raise ModelNotFound(
            f"{model} is not in the local hub cache and HF_HUB_OFFLINE is set", field="model", hint=_HINT
        )
    from tonnage.planner.headers.remote import Remote  # loads an HTTP client, slow to import

    return read(model, Remote(model))


def read(model: HubModel, remote: Remote, *, headers: bool = True) -> tuple[dict[str, Any], Checkpoint]:
    """Return config.json and the tensor headers of a model, read through a `Remote`.

    Args:
        model: the model's name and revision.
        remote: the connection to the model's files on the hub.
        headers: whether to read the headers of the weight files; otherwise only the checkpoint's index is read.

    Raises:
        ModelNotFound: the model cannot be fetched.
    """
    from tonnage.planner.headers.remote import fetch_checkpoint, fetch_config  # loads an HTTP client

    try:
        config = fetch_config(remote)
        if config is None:
            raise ModelNotFound("there is no config.json", field="model")
        return config, fetch_checkpoint(remote, headers=headers)
    except ModelNotFound as error:
        raise ModelNotFound(f"{model}: {error.message}", field="model", hint=error.hint or _HINT) from None
