"""GGUF files that are not on this machine: their headers are read from the hub, or computed from a config."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.planner.errors import CheckpointError, DeploymentError, HubUnreachable, ModelNotFound
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.headers import partial
from tonnage.planner.headers.gguf import GGUFHeader, read_gguf
from tonnage.planner.headers.gguf_config import config_from_gguf
from tonnage.planner.headers.gguf_types import file_type, gguf_tensors
from tonnage.planner.headers.hub import modelscope
from tonnage.planner.headers.names import HubModel
from tonnage.planner.model.fields import load_config
from tonnage.planner.source.hub import connect, shipped_models, snapshot_folder
from tonnage.planner.source.model import ModelSource

if TYPE_CHECKING:
    from tonnage.planner.headers.remote import Remote  # imported here, because it loads an HTTP client

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Bytes of a file that the first request fetches. A header with a vocabulary of 32,000 tokens fits into them. A
# larger header takes more requests.
_FIRST_BYTES = 1 << 20
_MOST_BYTES = 100 << 20


def as_gguf(source: ModelSource, kind: str) -> ModelSource:
    """Return config and headers of the GGUF file that llama.cpp would make of an unquantized model.

    Args:
        source: the model, with an unquantized config.
        kind: the GGUF file type, such as Q4_K_M; a key of `gguf_types.FILE_TYPES`.

    Raises:
        DeploymentError: the model is a GGUF file or quantized already.
        UnsupportedArchitecture: the tensors of the model's GGUF file are not known.
    """
    field = "--quantization"
    if source.kind == "gguf":
        raise DeploymentError(
            f"{source.id} is a GGUF file, whose tensor types are fixed", field=field, hint=f"leave out {field}"
        )
    if source.config.get("quantization_config") is not None:
        raise DeploymentError(
            "the checkpoint is quantized already; GGUF files are made of 16-bit weights", field=field,
            hint="give the unquantized model, or the .gguf file",
        )  # fmt: skip
    tensors = gguf_tensors(architecture_of(source.config), kind)
    note = (
        f"{kind} by llama.cpp's rules for each tensor (src/llama-quant.cpp), without an importance matrix; a "
        "published file may have other types: give the .gguf file for its own"
    )
    name = source.id.rpartition("/")[2]
    return replace(
        source, id=f"{source.id}:{kind}", path=f"{name}-{kind}.gguf", kind="gguf", tensors=tensors, index=None,
        file_type=kind, notes=(*source.notes, note),
    )  # fmt: skip


def hub_gguf(model: HubModel) -> ModelSource:
    """Return the config and tensor headers of a GGUF file on the hub, from the file's header.

    The header is read from the local hub cache if the file is there, else from the hub. If the hub does not
    answer, the tensors are computed from the file type and the base model's config.json that Tonnage ships.

    Raises:
        ModelNotFound: the file cannot be found or fetched.
        CheckpointError: the file's header is broken.
        UnsupportedArchitecture: the model's architecture is not supported.
    """
    if (cached := _cached(model)) is not None:
        return _source(model, [read_gguf(path) for path in cached])
    try:
        return _fetched(model)
    except HubUnreachable:
        base = re.sub(r"-gguf$", "", model.repo.partition("/")[2], flags=re.IGNORECASE).lower()
        shipped = {name.partition("/")[2].lower(): (name, path) for name, path in shipped_models().items()}
        kind = file_type(_tag(model.gguf))
        if base not in shipped or kind is None:
            raise
        name, path = shipped[base]
        note = (
            f"the hub was not reached, so {kind} of the config.json that Tonnage carries for {name} was "
            "planned; the file's own header was not read"
        )
        source = ModelSource(name, name, load_config(path), "hub", notes=(note,))
        return replace(as_gguf(source, kind), id=str(model), path=str(model))


def _tag(gguf: str) -> str:
    """Return the GGUF file type (such as Q4_K_M) in a model's tag, or at the end of a file's name."""
    stem = _SHARD.sub("", gguf).removesuffix(".gguf")
    found = re.search(r"[-.]((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32))$", stem, re.IGNORECASE)
    return found[1] if found else stem


def _choose(model: HubModel, names: Sequence[str]) -> list[str]:
    """Return the file that a model's GGUF tag or path selects among `names`, or all shards of that file.

    Raises:
        ModelNotFound: no file has this tag.
    """
    files = sorted(name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    if model.gguf.lower().endswith(".gguf"):
        found = [name for name in files if name == model.gguf]
    else:
        tag = re.escape(model.gguf)
        found = [name for name in files if re.search(rf"(?:^|[-./_]){tag}(?:[-.]|$)", name, re.IGNORECASE)]
        plain = [name for name in found if not re.search(rf"[-_]UD[-_]{tag}", name, re.IGNORECASE)]
        found = plain or found
    if not found:
        tags = sorted({_tag(name.rpartition("/")[2]) for name in files})
        hint = f"it has {', '.join(tags)}" if tags else "it has no .gguf file"
        raise ModelNotFound(f"{model.repo} has no GGUF file {model.gguf}", field="model", hint=hint)
    if (first := _SHARD.search(found[0])) is None:
        return found[:1]
    start = found[0][: first.start()]
    return [name for name in files if name.startswith(start) and _SHARD.search(name)]


def _cached(model: HubModel) -> list[Path] | None:
    """Return the paths of a model's GGUF shards in huggingface_hub's cache, or None if there are none."""
    snapshot = snapshot_folder(model)
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")] if snapshot.is_dir() else []
    try:
        return [snapshot / name for name in _choose(model, names)]
    except ModelNotFound:
        return None


def _fetched(model: HubModel) -> ModelSource:
    remote = connect(model, "give the .gguf file")
    if modelscope() and not model.gguf.lower().endswith(".gguf"):
        raise ModelNotFound(
            "a tag such as :Q4_K_M is for the Hugging Face hub only", field="model", hint="give the .gguf file"
        )
    try:
        return _source(model, [_header(remote, name) for name in _names(model, remote)])
    except ModelNotFound as error:
        raise type(error)(f"{model}: {error.message}", field="model", hint=error.hint) from None


def _names(model: HubModel, remote: Remote) -> list[str]:
    """Return the names of a model's GGUF files on the hub.

    If the user named one file and it is not a shard, the result is this file. Otherwise `_choose` selects from
    all files of the repository.
    """
    if model.gguf.lower().endswith(".gguf") and _SHARD.search(model.gguf) is None:
        return [model.gguf]
    return _choose(model, remote.files())


def _header(remote: Remote, name: str) -> GGUFHeader:
    """Return the header of a GGUF file; more of its first bytes are fetched until the header is complete."""
    count = _FIRST_BYTES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        while True:
            data, size = remote.first_bytes(name, count)
            path.write_bytes(data)
            partial.register(path, size)
            try:
                return read_gguf(path)
            except CheckpointError as error:
                if "truncated" not in error.message or len(data) >= min(size, _MOST_BYTES):
                    raise CheckpointError(error.message, field=name) from None
            count = min(4 * count, _MOST_BYTES)


def _source(model: HubModel, headers: Sequence[GGUFHeader]) -> ModelSource:
    """Return the config and tensor headers of a GGUF model, from the headers of its shards.

    The first shard has the metadata, and every shard has tensors.
    """
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    whole = replace(headers[0], tensors=tensors)
    name = str(model)
    return ModelSource(name, name, config_from_gguf(whole, name), "gguf", tensors)
