"""Model files over HTTP by range request: config, index and safetensors headers, never weights.

Sizes are capped before anything is read, a server that answers a range request with the whole file is refused,
and so is a redirect to another host (the hub's own storage hosts aside).
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPMessage
from typing import IO, Any
from urllib.parse import quote, urlsplit

from tonnage.planner.errors import CheckpointError, ModelNotFound
from tonnage.planner.headers.safetensors import (
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    merge_shards,
    parse_header,
    shard_names,
)
from tonnage.planner.model.fields import MAX_CONFIG_BYTES, parse_config
from tonnage.planner.model.tensor import HeaderTensor

_TIMEOUT_SECONDS = 10.0  # for one answer
_FIRST_BYTES = 1 << 16  # most headers of single files fit; a longer one takes a second request
_MAX_SHARDS = 64  # two requests each; larger models are planned from config.json alone
_THREADS = 8
_HUB = "https://huggingface.co"
# where huggingface.co sends requests for large files (LFS and Xet storage)
_HUB_STORAGE = (".huggingface.co", ".hf.co")


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects within the host it was sent to."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        hub = old.hostname is not None and ("." + old.hostname).endswith(_HUB_STORAGE)
        stored = hub and new.scheme == "https" and ("." + (new.hostname or "")).endswith(_HUB_STORAGE)
        if (new.scheme, new.hostname, new.port) != (old.scheme, old.hostname, old.port) and not stored:
            raise CheckpointError(
                f"is redirected from {old.hostname} to another host, {new.hostname}", field=old.path[-80:]
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Remote:
    """Files of one repository at ``<endpoint>/<model>/resolve/main/``."""

    def __init__(self, model: str, endpoint: str | None = None) -> None:
        base = (endpoint or os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
        self._base = f"{base}/{quote(model)}/resolve/main/"
        self._open = urllib.request.build_opener(_SameHost).open

    def read(self, name: str, limit: int) -> bytes | None:
        """A whole small file; None when there is none. Raises CheckpointError above ``limit`` bytes."""
        answer = self._get(name, None)
        if answer is None:
            return None
        with answer:
            stated = answer.headers.get("Content-Length")
            if stated is not None and stated.isdigit() and int(stated) > limit:
                raise CheckpointError(f"{int(stated):,} bytes are too many", field=name)
            data: bytes = answer.read(limit + 1)
        if len(data) > limit:
            raise CheckpointError(f"more than {limit:,} bytes are too many", field=name)
        return data

    def header(self, name: str) -> tuple[HeaderTensor, ...]:
        """Tensors of one safetensors file, from its first bytes."""
        data, size = self._range(name, 0, _FIRST_BYTES)
        if len(data) < 8:
            raise CheckpointError(f"{size} bytes are too short for a safetensors header", field=name)
        length = int.from_bytes(data[:8], "little")
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"claims a header of {length:,} bytes; the file has {size:,}, and {MAX_HEADER_BYTES:,} are "
                "read at most",
                field=name,
            )
        if 8 + length > len(data):
            rest, _ = self._range(name, len(data), 8 + length - len(data))
            data += rest
        return parse_header(data[8 : 8 + length], size - 8 - length, name)

    def _range(self, name: str, start: int, count: int) -> tuple[bytes, int]:
        """(bytes, size of the whole file)."""
        answer = self._get(name, f"bytes={start}-{start + count - 1}")
        if answer is None:
            raise CheckpointError("is missing", field=name)
        with answer:
            if answer.status != 206:
                raise CheckpointError(
                    "the server does not answer range requests; weights are not read", field=name
                )
            total = (answer.headers.get("Content-Range") or "").rpartition("/")[2]
            data: bytes = answer.read(count + 1)
        if not total.isdigit() or len(data) > count:
            raise CheckpointError("the server's answer is not the range asked for", field=name)
        return data, int(total)

    def _get(self, name: str, span: str | None) -> Any:
        request = urllib.request.Request(self._base + quote(name), headers={"User-Agent": "tonnage"})
        if span is not None:
            request.add_header("Range", span)
        try:
            return self._open(request, timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise ModelNotFound(f"the server answers {error.code} {error.reason}", field=name) from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ModelNotFound(f"cannot be fetched: {str(reason)[:200]}", field=name) from None


def fetch_config(remote: Remote) -> dict[str, Any] | None:
    """config.json with ModelOpt's file merged in, as from a folder; None when the repository has none."""
    data = remote.read("config.json", MAX_CONFIG_BYTES)
    if data is None:
        return None
    config = parse_config(data, "config.json")
    if config.get("quantization_config") is None:
        beside = remote.read("hf_quant_config.json", MAX_CONFIG_BYTES)
        found = parse_config(beside, "hf_quant_config.json").get("quantization") if beside else None
        if isinstance(found, dict):
            config["quantization_config"] = {"quant_method": "modelopt", **found}
    return config


def fetch_tensors(remote: Remote) -> tuple[HeaderTensor, ...] | None:
    """Headers of ``model.safetensors`` or of all shards; None when there is neither or too many shards."""
    index = remote.read("model.safetensors.index.json", MAX_INDEX_BYTES)
    if index is None:
        try:
            return remote.header("model.safetensors")
        except CheckpointError as error:
            if error.message == "is missing":
                return None
            raise
    try:
        content = json.loads(index)
    except (ValueError, RecursionError):
        raise CheckpointError("is not JSON", field="model.safetensors.index.json") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    shards = shard_names(weight_map, "model.safetensors.index.json")
    if len(shards) > _MAX_SHARDS:
        return None
    with ThreadPoolExecutor(_THREADS) as pool:
        headers = list(pool.map(remote.header, shards))
    return merge_shards(dict(zip(shards, headers, strict=True)), weight_map, "model.safetensors.index.json")
