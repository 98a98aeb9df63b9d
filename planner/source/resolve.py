"""Resolution of a model's name to a ModelSource: its config and, if available, its tensor headers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tonnage.planner.errors import CheckpointError, ModelNotFound
from tonnage.planner.families.registry import family_of
from tonnage.planner.headers.config_files import add_config_files
from tonnage.planner.headers.index import INDEX, read_folder
from tonnage.planner.model.fields import load_config
from tonnage.planner.source.model import ModelSource as ModelSource

DEMO_NAME = "SmolLM2-135M-Instruct"
_HINT = 'give a folder with config.json, a hub id "org/name" or "org/name@revision", or "demo"'
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


_KEPT: dict[str, ModelSource] = {}


def keep(source: ModelSource) -> None:
    """Cache a model's config and headers, so that `resolve_model` does not read the files again.

    The web page calls this function, because the page plans the same model many times.
    """
    _KEPT[source.id] = source


def forget(model: str) -> None:
    """Drop the config and headers that `keep` cached for a model, because its files may have changed."""
    _KEPT.pop(model, None)


def cache_folder() -> Path:
    """Return Tonnage's cache folder: `$TONNAGE_CACHE`, else `$XDG_CACHE_HOME/tonnage`, else `~/.cache/tonnage`.

    Raises:
        ModelNotFound: the user has no home directory.
    """
    if own := os.environ.get("TONNAGE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tonnage"
    try:
        return Path.home() / ".cache" / "tonnage"
    except RuntimeError:  # in a container, a user id may have neither HOME nor an entry in passwd
        raise ModelNotFound(
            "this user has no home directory for the cache", field="model", hint="set TONNAGE_CACHE to a folder"
        ) from None


def demo_folder() -> Path:
    """Return the folder in Tonnage's cache for the converted demo model, which may not exist."""
    return cache_folder() / "models" / DEMO_NAME


def resolve_model(model: str) -> ModelSource:
    """Find a model by its name and read its config.json and headers, never its weights.

    The name `demo` stands for SmolLM2-135M-Instruct. Until this model was downloaded and converted, its
    config.json in the package is used.

    Raises:
        ModelNotFound: no model has this name; the message says what to do.
        ConfigError: config.json is broken.
        CheckpointError: a header or index is broken.
    """
    if (kept := _KEPT.get(model)) is not None:
        return kept
    if model == "demo":
        return _demo()
    if not model or "\0" in model:
        raise ModelNotFound(f"{model!r} is not the name of a model", field="model", hint=_HINT)
    try:
        return _local(Path(model).expanduser(), model) or _hub(model)
    except OSError as error:  # for example, no permission to read the path, or too long a name
        raise ModelNotFound(f"{model[:120]!r}: {error.strerror}", field="model", hint=_HINT) from None
    except RuntimeError as error:  # In a path such as ~name/model, the user `name` does not exist.
        raise ModelNotFound(f"{model[:120]!r}: {error}", field="model", hint=_HINT) from None


def _local(path: Path, model: str) -> ModelSource | None:
    if path.is_dir():
        return _folder(path, model)
    return _file(path, model) if path.exists() else None


def _hub(model: str) -> ModelSource:
    from tonnage.planner.headers.names import hub_model  # imported here, because a local model does not need it

    if (named := hub_model(model)) is None:
        from tonnage.planner.source.hub import shipped_like  # imported here, because only this error needs it

        close = shipped_like(model) if "/" not in model and "." not in model[:1] else []
        raise ModelNotFound(
            f"{model[:120]!r} is neither a folder, a .gguf file nor a hub id", field="model",
            hint=f"did you mean {' or '.join(close)}? {_HINT.capitalize()}" if close else _HINT,
        )  # fmt: skip
    if named.gguf:
        from tonnage.planner.source.gguf import hub_gguf  # imported here, because only GGUF files need it

        return hub_gguf(named)
    from tonnage.planner.source.hub import (
        cached_snapshot,
        fetch_or_shipped,
    )  # imported here, because it loads an HTTP client, which is slow

    name, snapshot = str(named), cached_snapshot(named)
    if snapshot is None:
        config, found, notes = fetch_or_shipped(named)
        return ModelSource(name, name, config, "hub", found.tensors, found.index, notes)
    weights = any(any(snapshot.glob(kind)) for kind in ("*.safetensors", "*.bin"))
    found = read_folder(snapshot)
    path = str(snapshot) if weights else name
    return ModelSource(name, path, read_config(snapshot), "hub", found.tensors, found.index)


def _demo() -> ModelSource:
    folder = demo_folder()
    config = folder / "config.json"
    if config.exists():
        return ModelSource("demo", str(folder), load_config(config), "demo", read_folder(folder).tensors)
    shipped = Path(__file__).parent / "data" / "demo" / "config.json"
    return ModelSource("demo", str(folder), load_config(shipped), "demo")


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model's folder, extended by other files that affect memory.

    These are ModelOpt's hf_quant_config.json, which states the quantization if config.json does not;
    sentence_*_config.json, which limits the length of an encoder's texts; and the image processor's files,
    which limit image sizes.
    """
    config = load_config(folder / "config.json")

    def read(name: str) -> dict[str, Any] | None:
        return load_config(folder / name) if (folder / name).is_file() else None

    add_config_files(config, read)
    if "max_seq_length" not in config and family_of(config.get("model_type")).files.sentence_length:
        for beside in sorted(folder.glob("sentence_*_config.json")):
            config["max_seq_length"] = load_config(beside).get("max_seq_length")
            break
    return config


def _folder(path: Path, model: str) -> ModelSource:
    if not (path / "config.json").exists():
        raise ModelNotFound(
            f"{model} has no config.json", field="model", hint="give the folder that from_pretrained would load"
        )
    found = read_folder(path)
    return ModelSource(model, str(path), read_config(path), "folder", found.tensors, found.index)


def _file(path: Path, model: str) -> ModelSource:
    if path.suffix.lower() in _PICKLES:
        raise CheckpointError(
            f"{model} is a pickle file: reading it runs code", field="model",
            hint="convert it to safetensors, or give the model's folder",
        )  # fmt: skip
    if path.is_file() and path.name in ("config.json", INDEX):
        return _folder(path.parent, str(path.parent))
    if path.is_file() and path.suffix.lower() == ".json":  # a config.json under another name
        return ModelSource(model, str(path), load_config(path), "folder")
    if not path.is_file() or path.suffix.lower() != ".gguf":
        raise ModelNotFound(
            f"{model} is a file but not a .gguf or a config.json", field="model",
            hint="give the model's folder instead",
        )  # fmt: skip
    from tonnage.planner.headers.gguf import read_gguf  # imported here, because only GGUF needs it
    from tonnage.planner.headers.gguf_config import config_from_gguf

    header = read_gguf(path)
    return ModelSource(model, str(path), config_from_gguf(header, path.name), "gguf", header.tensors)
