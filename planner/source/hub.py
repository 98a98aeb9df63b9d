"""Configs and tensor headers of hub models, from the local hub cache or by HTTP range requests.

Only config.json, the index and the headers of safetensors files are fetched, no weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.planner.errors import HubUnreachable, ModelNotFound
from tonnage.planner.headers.hub import hub_cache, modelscope, modelscope_caches, offline
from tonnage.planner.headers.index import Checkpoint
from tonnage.planner.headers.names import HubModel, revision_of
from tonnage.planner.model.fields import load_config

if TYPE_CHECKING:
    from tonnage.planner.headers.remote import Remote  # imported here, because it loads an HTTP client

_SHIPPED = Path(__file__).parent.parent / "page" / "data" / "models"
_HINT = "give a local folder with config.json, or a name the hub knows"


def cached_snapshot(model: HubModel) -> Path | None:
    """Return the folder of a model's revision in the local hub cache, None without a config.json there."""
    if modelscope():
        revision = revision_of(model)
        folders = modelscope_caches(model.repo, revision)[: None if revision == "master" else 1]
        return next((folder for folder in folders if (folder / "config.json").exists()), None)
    snapshot = snapshot_folder(model)
    return snapshot if (snapshot / "config.json").exists() else None


def snapshot_folder(model: HubModel) -> Path:
    """Return the folder of a model's revision in huggingface_hub's cache, which may not exist."""
    folder = hub_cache() / ("models--" + model.repo.replace("/", "--"))
    try:
        commit = (folder / "refs" / model.revision).read_text().strip()
    except OSError:
        commit = model.revision
    return folder / "snapshots" / commit


def connect(model: HubModel, hint: str) -> Remote:
    """Return a connection to a model's files on the hub, without sending a request yet.

    Args:
        model: the model's name and revision.
        hint: advice in the error message if access to the hub is disabled.

    Raises:
        HubUnreachable: access to the hub is disabled.
        ModelNotFound: the hub token is invalid.
    """
    if offline():
        raise HubUnreachable(
            f"{model} is not in the local hub cache and HF_HUB_OFFLINE is set", field="model", hint=hint
        )
    # imported here, because it loads an HTTP client, which is slow
    from tonnage.planner.headers.remote import Remote

    return Remote(model)


def read(model: HubModel, remote: Remote, *, headers: bool = True) -> tuple[dict[str, Any], Checkpoint]:
    """Return config.json and the tensor headers of a model, read through a `Remote`.

    Args:
        model: the model's name and revision.
        remote: the connection to the model's files on the hub.
        headers: whether to read the headers of the weight files; otherwise only the checkpoint's index is read.

    Raises:
        ModelNotFound: the model cannot be fetched.
    """
    # imported here, because it loads an HTTP client
    from tonnage.planner.headers.remote import fetch_checkpoint, fetch_config

    try:
        config = fetch_config(remote)
        if config is None:
            raise ModelNotFound("the model has no config.json", field="model")
        return config, fetch_checkpoint(remote, headers=headers)
    except ModelNotFound as error:
        kind = type(error)
        raise kind(f"{model}: {error.message}", field="model", hint=error.hint or _HINT) from None


def shipped_models() -> dict[str, Path]:
    """Return hub id -> path of config.json, for the models whose config Tonnage ships (`tonnage page`)."""
    return {path.stem.replace("__", "/", 1): path for path in sorted(_SHIPPED.glob("*.json"))}


def shipped_like(name: str) -> list[str]:
    """Return the hub ids of at most three shipped models whose names are most similar to `name`."""
    from difflib import get_close_matches  # imported here, because only an error message needs it

    # Names are compared without the organization and without words that do not affect memory, such as instruct.
    plain = {re.sub(r"-(?:instruct|chat|hf|it)$|^meta-", "", _last(full)): full for full in shipped_models()}
    wanted = re.sub(r"-(?:instruct|chat|hf|it)$|^meta-", "", _last(name))
    if wanted in plain:
        return [plain[wanted]]
    starting = [each for each in plain if each.startswith(wanted)] if len(wanted) > 3 else []
    found = [*get_close_matches(wanted, plain, 3, 0.8), *starting]
    return [plain[each] for each in dict.fromkeys(found)][:3]


def _last(name: str) -> str:
    return name.rpartition("/")[2].lower().replace("_", "-")


def fetch_or_shipped(model: HubModel) -> tuple[dict[str, Any], Checkpoint, tuple[str, ...]]:
    """Return config.json and headers from the hub, or the shipped config.json if the hub does not answer.

    Returns:
        The config, the checkpoint's headers or index, and notes for the plan.

    Raises:
        HubUnreachable: the hub does not answer, and Tonnage does not ship the model's config.
        ModelNotFound: the model cannot be fetched.
    """
    try:
        return *read(model, connect(model, _HINT)), ()
    except HubUnreachable as error:
        shipped = shipped_models()
        if (path := shipped.get(str(model))) is None:
            close = shipped_like(str(model))
            hint = error.hint or _HINT
            if close:
                hint += f"; without the hub, these can be planned: {', '.join(close)}"
            raise HubUnreachable(error.message, field=error.field, hint=hint) from None
        why = error.message.rpartition(": ")[2] if ": " in error.message else "HF_HUB_OFFLINE is set"
        note = (
            f"the hub was not reached ({why}), so the config.json that Tonnage carries for {model} was used; "
            "the checkpoint's headers were not compared"
        )
        return load_config(path), Checkpoint(), (note,)
