"""The flags of ``tonnage replay`` for KV tiers, and the curve of hit rate by tier size as text and JSON."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tonnage.planner.devices.catalogue import Gpu, find_gpu
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture, did_you_mean
from tonnage.planner.plans import Plan
from tonnage.planner.units import gib, parse_size

if TYPE_CHECKING:
    from tonnage.cache.replay.tier_curve import TierCurve
    from tonnage.cache.replay.tiers import TierSetup

_NAMES = ("host", "disk")
# Peak bytes per second in one direction: PCIe 3.0, 4.0 and 5.0 with 16 lanes (8, 16, 32 GT/s, 128b/130b coding,
# PCI-SIG), and NVLink-C2C (NVIDIA's Grace Hopper and Grace Blackwell data sheets: 900 GB/s in both directions).
_PCIE_3, _PCIE_4, _PCIE_5, _C2C = 15.75e9, 31.5e9, 63.0e9, 450e9
_FIELD = "--tiers"
OWN_SPEED = "leave it out to use the GPU's own value"


def setup_of_tiers(arguments: argparse.Namespace, plan: Plan) -> TierSetup | None:
    """Return the simulator's KV tiers as the flags configure them, or None without --tiers.

    Raises:
        DeploymentError: a flag is not understood, or a bandwidth is not known.
        UnsupportedArchitecture: the model has layers that do not keep every token (windows, states).
    """
    if arguments.tiers is None:
        for name in ("tier_policy", "host_bandwidth", "disk_bandwidth"):
            if getattr(arguments, name) is not None:
                raise DeploymentError(f"needs {_FIELD}", field=f"--{name.replace('_', '-')}")
        return None
    # imported here, because --help does not need it
    from tonnage.cache.replay.tiers import TierSetup

    sizes = _sizes(arguments.tiers)
    host = speed_of(arguments.host_bandwidth, 1e9, "--host-bandwidth", OWN_SPEED)
    disk = speed_of(arguments.disk_bandwidth, 1e9, "--disk-bandwidth", "give GB/s")
    if host is None:
        host = _link(find_gpu(arguments.gpu) if arguments.gpu else None)
    token_bytes = token_bytes_of(plan)
    if sizes.get("disk") and disk is None:
        raise DeploymentError("the speed of the disk is not known", field="--disk-bandwidth", hint="give GB/s")
    return TierSetup(
        host_bytes=sizes["host"],
        disk_bytes=sizes.get("disk", 0),
        token_bytes=token_bytes,
        policy=arguments.tier_policy or "lru",
        # Each GPU loads its own part of the blocks over its own link, so the bandwidths add up.
        host_bandwidth=host * token_bytes / rank_token_bytes(plan),
        disk_bandwidth=disk or 1.0,
    )


def token_bytes_of(plan: Plan) -> int:
    """Return the KV bytes of one token in all layers, summed over the ranks that divide the KV heads.

    All ranks hold the same MLA latents, so a tier keeps them only once (vLLM 0.32, v1/kv_offload/cpu/spec.py).

    Raises:
        UnsupportedArchitecture: some layers (sliding windows, states) do not keep the KV of every token.
    """
    layout = plan.kv_cache.layout
    kinds = sorted({group.kind for group in layout.groups} - {"full", "mla"})
    if kinds or not layout.groups:
        raise UnsupportedArchitecture(
            f"a replay with tiers needs layers that keep every token; this model has {', '.join(kinds)} layers",
            field=_FIELD,
            hint="tonnage plan with --kv-offloading-size prints how many tokens a tier holds",
        )
    ranks = plan.deployment.tensor_parallel_size
    return sum(layout.token_bytes(group) * (ranks if group.kind == "full" else 1) for group in layout.groups)


def rank_token_bytes(plan: Plan) -> int:
    """Return the KV bytes of one token on one rank, in the layers that keep every token."""
    layout = plan.kv_cache.layout
    return sum(layout.token_bytes(group) for group in layout.groups if group.kind != "state")


def _sizes(text: str) -> dict[str, int]:
    """Parse a flag of the form ``host=SIZE,disk=SIZE`` into bytes by tier name."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals:
            raise DeploymentError(
                f"{part[:60]!r} is not NAME=SIZE", field=_FIELD, hint="for example host=64GiB"
            )
        if name not in _NAMES:
            hint = did_you_mean(name, _NAMES) or "host or disk"
            raise DeploymentError(f"{name[:60]!r} is not a tier", field=_FIELD, hint=hint)
        if name in found:
            raise DeploymentError(f"the tier {name} is given twice", field=_FIELD, hint="give it once")
        found[name] = parse_size(size, _FIELD)
    if "host" not in found:
        raise DeploymentError(
            "a disk tier needs one in host memory before it", field=_FIELD, hint="host=SIZE,disk=SIZE"
        )
    return found


def speed_of(value: float | None, unit: float, field: str, hint: str) -> float | None:
    """Return a speed that an option gives, times its unit, or None if the option is absent.

    Raises:
        DeploymentError: the value is not a positive finite number; `field` names the option.
    """
    if value is not None and not 0 < value < float("inf"):
        raise DeploymentError(f"{value} is not a positive finite number", field=field, hint=hint)
    return None if value is None else value * unit


def _link(gpu: Gpu | None) -> float:
    """Return the peak bandwidth of the link from host memory to the GPU ``gpu``, in bytes per second."""
    if gpu is not None and gpu.name.startswith(("gh200", "gb200", "gb300")):
        return _C2C
    if gpu is None or gpu.capability is None:
        raise DeploymentError(
            "the bandwidth from host memory to the device is not known",
            field="--host-bandwidth",
            hint="give GB/s",
        )
    return _PCIE_3 if gpu.capability < (8, 0) else _PCIE_4 if gpu.capability < (9, 0) else _PCIE_5


def curve_rows(curve: TierCurve, chunk_bytes: int, hicache: float | None) -> list[tuple[str, str]]:
    """Return the curve of KV hit rate by cache size as rows of text (size, hit rate).

    The curve is followed by a row for its knee, the smallest cache with 95 % of the highest hit rate. The last
    row shows ``hicache``, the hit rate of SGLang's HiCache with the KV pool and host tier that the flags
    configure. It is omitted if ``hicache`` is None.
    """
    rows = [("hit rate by size", f"LRU, pool and tiers together; any size {100 * curve.highest:.2f} %")]
    rows += [(f"  {gib(size)}", f"{100 * rate:.2f} %") for size, rate in curve.points(chunk_bytes)]
    knee = curve.knee()
    rows.append(("  knee", f"{gib(knee * chunk_bytes)}, {100 * curve.hit_rate(knee):.2f} %"))
    if hicache is not None:
        rows.append(("  SGLang's HiCache", f"{100 * hicache:.2f} % with this pool and host tier"))
    return rows


def curve_dict(curve: TierCurve, chunk_bytes: int, hicache: float | None) -> dict[str, object]:
    """Return the curve of KV hit rate by cache size as a JSON object, with sizes in bytes.

    ``hicache`` is the hit rate of SGLang's HiCache, or None. Its KV pool and host tier are those that the flags
    configure.
    """
    return {
        "points": [{"bytes": size, "hit_rate": round(rate, 5)} for size, rate in curve.points(chunk_bytes)],
        "highest": round(curve.highest, 5),
        "knee_bytes": curve.knee() * chunk_bytes,
        "sampled": round(curve.rate, 5),
        "hicache_hit_rate": None if hicache is None else round(hicache, 5),
    }
