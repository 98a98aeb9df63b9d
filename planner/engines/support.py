"""Check whether an engine supports a deployment on a GPU, by the table support.json with one source per fact.

- The table's entry ``read`` names the oldest and newest engine release whose source was read. A row applies to
  these releases, and may be limited by ``since`` and ``before``. Older releases are not checked. Newer releases
  are treated like the newest known release.
- Rows for weight formats give the minimum compute capability and the dtypes that the engine's config class
  states. ``most`` is the highest compute capability for which the engine has kernels. ``x86`` is the
  instruction set that an x86 CPU needs. For example, vLLM's kernel for 4-bit weights on CPUs (cpu_gemm_wna16)
  exists only in builds for AVX-512.
- Rows for the KV cache give the attention backends that support a format.
- A combination without a row is not checked.

tests/planner/test_support.py compares the rows with the engines' own checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.planner.devices.catalogue import Gpu, gpu_named
from tonnage.planner.devices.host import cpu_features_of
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.version import Version, parse_version
from tonnage.planner.errors import NotSupported
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.plans import Resolved
from tonnage.planner.quantization.scheme import Quantization

_ATTENTION = ("full", "sliding", "chunked")
_PARTS = ("refused", "unknown", "notes")


@dataclass(frozen=True, slots=True)
class Support:
    """The result of the support check: whether a deployment runs, and why not.

    Attributes:
        refused: Reasons for which the engine itself refuses the deployment.
        unknown: Reasons for which it is not known whether the deployment runs.
        notes: Notes on how the deployment runs, such as emulated formats.
    """

    refused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Return whether the deployment is known to run without plugins."""
        return not self.refused and not self.unknown

    @property
    def why(self) -> str:
        """Return the reasons for which the deployment does not run, as one sentence."""
        return "; ".join((*self.refused, *self.unknown))


def support(
    engine: Engine, chosen: Resolved, quantization: Quantization, architecture: Architecture
) -> Support:
    """Return whether ``engine`` supports this deployment, regardless of memory.

    Raises:
        NotSupported: the engine has no build for the device.
    """
    flags = chosen.flags
    device = on_device(engine.name, flags.gpu, chosen.version)
    if device.refused:
        hint = "--engine llama.cpp" if on_device("llama.cpp", flags.gpu).runs else "another GPU"
        raise NotSupported(device.why, field="--gpu", hint=hint)
    known = engine.shows_version and flags.engine_version not in (None, "none")
    named = f"{engine.title} {flags.engine_version}" if known else engine.title
    parts = (
        device,
        of_weights(engine.name, named, chosen.version, quantization, chosen),
        of_cache(engine.name, named, chosen.version, chosen, architecture),
    )
    if all(part is NOTHING for part in parts):
        return NOTHING
    return Support(*(tuple(why for part in parts for why in getattr(part, name)) for name in _PARTS))


NOTHING = Support()


@cache
def table() -> dict[str, Any]:
    """Return support.json: the GPUs, weight formats and KV cache formats that each engine supports."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "support.json").read_text())
    return found


def on_device(engine: str, gpu: str | None, version: Version | None = None) -> Support:
    """Return whether ``engine`` has a build for the device ``gpu`` (None is a CPU).

    If ``version`` is None, the newest release is checked.
    """
    found = gpu_named(gpu)
    if found is None:
        return NOTHING
    for row in table()["devices"]:
        before = version is not None and version < parse_version(row.get("since", "0.0.0"))
        if row["engine"] == engine and _is_about(row, found) and not before:
            why = f"{row['why']} ({row['source']}{_span(engine)})"
            return Support(refused=(why,)) if row["runs"] is False else Support(unknown=(why,))
    return NOTHING


def _is_about(row: Mapping[str, Any], gpu: Gpu) -> bool:
    """Return whether ``row``, an entry of ``devices`` in support.json, covers ``gpu``.

    A row names one GPU, all GPUs of a vendor, or the vendor's GPUs ``below`` a compute capability.
    """
    if "gpu" in row:
        return bool(row["gpu"] == gpu.name)
    older = "below" not in row or (gpu.capability is not None and gpu.capability < _capability(row["below"]))
    return older and bool(row["vendor"] == gpu.vendor)


def of_weights(
    engine: str, title: str, version: Version, quantization: Quantization, chosen: Resolved
) -> Support:
    """Return whether the engine supports the weight format on the GPU, with the requested activation dtype."""
    if quantization.scheme == "none":
        return NOTHING
    gpu = gpu_named(chosen.flags.gpu)
    has = gpu.capability if gpu else None
    here = cpu_features_of(chosen.flags.device)
    refused, notes = [], []
    for scheme in quantization.scheme.split("+"):
        row = _weights_row(engine, version, quantization.method, scheme)
        if row is None:
            continue
        where = f"{row['source']}{_span(engine)}"
        if row.get("runs") is False:
            refused.append(f"{title} {row['why']}: {scheme} does not load ({where})")
        elif chosen.flags.dtype not in row["dtypes"]:
            refused.append(
                f"{title} computes with {scheme} weights in {' or '.join(row['dtypes'])}, not in "
                f"{chosen.flags.dtype} ({where})"
            )
        elif "x86" in row and here and row["x86"] not in here:
            refused.append(
                f"{title} runs {scheme} weights on x86 CPUs with {row['x86']}, which this CPU lacks: weights "
                f"in another format would load ({where})"
            )
        elif gpu is not None and has is not None and has < _capability(row.get("least", "0.0")):
            refused.append(
                f"{title} runs {scheme} weights from compute capability {row['least']} on, {gpu.name} has "
                f"{_text(has)} ({where})"
            )
        elif gpu is not None and has is not None and has > _capability(row.get("most", "99.9")):
            refused.append(
                f"{title} runs {scheme} weights up to compute capability {row['most']}, {gpu.name} has "
                f"{_text(has)} ({where})"
            )
        elif gpu is not None and has is not None and has < _capability(row.get("native", "0.0")):
            notes.append(
                f"{title} unpacks {scheme} weights for each product and computes in {chosen.flags.dtype} on "
                f"{gpu.name}: products in that format come with compute capability {row['native']} ({where})"
            )
    return Support(tuple(refused), notes=tuple(notes))


def of_cache(
    engine: str, title: str, version: Version, chosen: Resolved, architecture: Architecture
) -> Support:
    """Return whether an attention backend of the engine supports the KV cache's format on the GPU."""
    gpu, asked = gpu_named(chosen.flags.gpu), chosen.flags.kv_cache_dtype
    if gpu is None:
        return NOTHING
    rows = [row for row in _rows("cache", engine, version) if row["vendor"] == gpu.vendor]
    layers = [layer for layer in architecture.cache_layers if layer.kind in (*_ATTENTION, "mla")]
    # Layers with a sparse indexer or with token compression have cache formats of their own.
    sparse = any(layer.index_size or layer.compression > 1 for layer in layers)
    if not rows or asked not in _judged(engine) or sparse:
        return NOTHING
    for attention, head in sorted({_attention(layer) for layer in layers}):
        near = [row for row in rows if row["attention"] == attention and asked in row["kv"]]
        if any(_serves(row, gpu, head) for row in near):
            continue
        of = f" with heads of {head} values" if attention == "plain" else " for latent attention"
        tried = "; ".join(f"{row['backend']} {_limits(row)}: {row['source']}" for row in near)
        has = f", compute capability {_text(gpu.capability)}" if gpu.capability else ""
        why = f"{title} has no attention backend for a cache in {asked}{of} on {gpu.name}{has}"
        span = _span(engine, "cache")
        return Support((f"{why} ({tried}{span})" if near else f"{why}{span}",))
    return NOTHING


def _weights_row(engine: str, version: Version, method: str | None, scheme: str) -> Mapping[str, Any] | None:
    """Return the row of support.json for a weight format, or None without one.

    ``method`` is the checkpoint's quant_method, or None if a flag requests the format.
    """
    for row in _rows("weights", engine, version):
        if scheme not in row["formats"]:
            continue
        # "asked" is True if the row of support.json covers only formats that a flag requests, False if it
        # covers only formats of the checkpoint, and absent if it covers both.
        asked = row.get("asked")
        if method is None and asked is not False:
            return row
        if method is not None and asked is not True and (row["method"].startswith(method) or not row["method"]):
            return row
    return None


@cache
def _judged(engine: str) -> frozenset[str]:
    """Return the KV cache formats of ``engine`` that support.json has a row for."""
    return frozenset(kv for row in table()["cache"] if row["engine"] == engine for kv in row["kv"])


@cache  # cached, because a sweep over many GPUs looks up the same rows repeatedly
def _rows(part: str, engine: str, version: Version) -> tuple[Mapping[str, Any], ...]:
    known = table()["read"].get(engine)
    if known is None or version < parse_version(known[0]):
        return ()
    version = min(version, parse_version(known[1]))
    return tuple(
        row
        for row in table()[part]
        if row["engine"] == engine
        and parse_version(row.get("since", known[0])) <= version
        and ("before" not in row or version < parse_version(row["before"]))
    )


def _serves(row: Mapping[str, Any], gpu: Gpu, head: int) -> bool:
    if row.get("heads") and head not in row["heads"]:
        return False
    if gpu.capability is None:
        return True
    least, most = row.get("least", "0.0"), row.get("most", "99.9")
    return _capability(least) <= gpu.capability <= _capability(most)


def _limits(row: Mapping[str, Any]) -> str:
    if "least" not in row:
        text = "any GPU"
    elif "most" in row:
        text = f"{row['least']} to {row['most']}"
    else:
        text = f"from {row['least']} on"
    return f"{text}, heads of {', '.join(map(str, row['heads']))}" if "heads" in row else text


def _attention(layer: Any) -> tuple[str, int]:
    return ("latent", 0) if layer.kind == "mla" else ("plain", layer.head_size)


def _span(engine: str, part: str = "weights") -> str:
    """Return a text on the releases that support.json covers, such as "; read in 0.20.0 to 0.33.0", or "".

    ``part`` is the section of support.json, such as weights or cache.
    """
    first, last = table()["read"][engine]
    since = [row.get("since", first) for row in table()[part] if row["engine"] == engine]
    first = min(since, key=parse_version, default=first)
    if not any(parse_version(last)):
        return ""
    return f"; read in {first} to {last}" if first != last else f"; read in {first}"


@cache
def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
