"""The GPU catalogue (catalogue.json): memory of each device, with a source for every figure.

In the file, `reported_gib` is the memory that CUDA or ROCm reports, to which --gpu-memory-utilization applies.
If drivers of different age report different totals, `reported_range_gib` has the smallest and the largest.
`variants` are totals under another setting of the machine, such as ECC or the Windows driver. If no source
publishes the reported memory, the data sheet's size less `NOMINAL_RESERVE` is assumed, and `Gpu.basis` is
`nominal`.

`memory_gb_per_s`, `dense_16bit_tflops` and `dense_fp8_tflops` are peak figures of the vendor (`speed_source`),
without sparsity and, for NVIDIA, with accumulation in FP32. `link_gb_per_s` is the link between GPUs, as data
sheets state it: the sum of both directions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.planner.devices.host import host_memory
from tonnage.planner.errors import DeploymentError
from tonnage.planner.units import GiB, gib

NOMINAL_RESERVE = 0.02
"""Fraction of the nominal memory that drivers and ECC reserve.

It is the median over the NVIDIA GPUs for which the catalogue has both the nominal and the reported memory,
rounded up to the next quarter percent:
H100 1.0 %, A100 1.1 %, B200 0.9 %, RTX 4090 1.5 %, L40S 7.5 %, T4 9.0 %. tests/planner/test_gpus.py recomputes
the median.
"""

LARGEST_RESERVE = 0.09
"""Largest fraction of the nominal memory that a driver reserves (T4 with ECC), used for lower bounds."""

APPLE_SHARE = 0.75
"""Fraction of unified memory that Metal lets the GPU use by default on machines of 64 GB and more.

Metal reports this limit as recommendedMaxWorkingSetSize.
"""

SMALL_APPLE_SHARE = 2 / 3
"""Fraction of unified memory that Metal lets the GPU use on machines below 64 GB.

It gives the lower bound of an assumed total.
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: an entry of the GPU catalogue, or the local GPU or CPU.

    Attributes:
        memory_bytes: bytes of device memory that an engine can use.
        basis: origin of `memory_bytes`: `reported` by the driver, or `nominal`, the data sheet's size less a
            reserve.
        source: source of the memory figure.
        capability: CUDA compute capability (developer.nvidia.com/cuda-gpus), None for other vendors.
        bandwidth: peak memory bandwidth in bytes per second of the SXM (or only) variant, None if not known.
        flops: peak dense 16-bit tensor FLOPs per second of the SXM (or only) variant, None if not known.
        fp8_flops: peak dense FP8 tensor FLOPs per second, None for GPUs without FP8.
        link: bytes per second that one GPU can send to the other GPUs of its machine, None if not known.
        mesh: number of other GPUs to which a GPU has direct links, among which `link` is divided; None if a
            switch connects the GPUs.
        memory_bounds: (smallest, largest) `memory_bytes` that drivers report; if `basis` is `nominal`, the
            bounds of the assumed value.
        variants: (bytes, setting) for each setting of the machine that changes the reported memory.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    device: str
    memory_bytes: int
    basis: str
    source: str
    capability: tuple[int, int] | None = None
    bandwidth: float | None = None
    flops: float | None = None
    fp8_flops: float | None = None
    link: float | None = None
    mesh: int | None = None
    memory_bounds: tuple[int, int] | None = None
    variants: tuple[tuple[int, str], ...] = ()

    def link_among(self, ranks: int) -> float | None:
        """Return the bytes per second that a GPU can send to the others in a group of `ranks` GPUs.

        Returns None if the rate is not known.
        """
        if self.link is None or self.mesh is None:
            return self.link
        return self.link * min(1.0, (ranks - 1) / self.mesh)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on this GPU's total memory: that it is assumed, or that a machine setting changes it."""
        if self.basis == "nominal" and self.memory_bounds is not None:
            low, high = self.memory_bounds
            return (
                f"no source publishes the memory that the driver of {self.name} reports: "
                f"{gib(self.memory_bytes)} is assumed, between {gib(low)} and {gib(high)}; "
                "--device-memory sets the real total",
            )
        return tuple(
            f"{self.name} has {gib(size)} {setting}, and {gib(self.memory_bytes)} otherwise: "
            f"--device-memory {size / GiB:.2f}GiB plans that"
            for size, setting in self.variants
        )


@cache
def catalogue() -> tuple[Gpu, ...]:
    """Return every GPU of the catalogue, in the order of catalogue.json."""
    data = json.loads((Path(__file__).parent / "catalogue.json").read_text())
    return tuple(_gpu(entry) for entry in data["gpus"])


def _gpu(entry: dict[str, Any]) -> Gpu:
    nominal, reported = entry["nominal_gib"], entry.get("reported_gib")
    if reported is not None:
        memory, basis, source = reported * GiB, "reported", entry["reported_source"]
        low, high = entry.get("reported_range_gib", (reported, reported))
    else:
        apple = entry["vendor"] == "apple"
        share = APPLE_SHARE if apple else 1 - NOMINAL_RESERVE
        memory, basis, source = nominal * GiB * share, "nominal", entry["nominal_source"]
        least, most = (SMALL_APPLE_SHARE, APPLE_SHARE) if apple else (1 - LARGEST_RESERVE, 1.0)
        low, high = nominal * least, nominal * most
    return Gpu(
        name=str(entry["name"]),
        aliases=tuple(entry["aliases"]),
        vendor=str(entry["vendor"]),
        device=str(entry["device"]),
        memory_bytes=int(memory),
        basis=basis,
        source=str(source),
        capability=_version(entry.get("compute_capability")),
        bandwidth=_scaled(entry.get("memory_gb_per_s"), 1e9),
        flops=_scaled(entry.get("dense_16bit_tflops"), 1e12),
        fp8_flops=_scaled(entry.get("dense_fp8_tflops"), 1e12),
        # Data sheets state the sum of both directions of the link between GPUs; `link` is one direction.
        link=_scaled(entry.get("link_gb_per_s"), 1e9 / 2),
        mesh=entry.get("link_mesh"),
        memory_bounds=(int(low * GiB), int(high * GiB)),
        variants=tuple((int(each["gib"] * GiB), each["when"]) for each in entry.get("variants", ())),
    )


def _version(text: object) -> tuple[int, int] | None:
    major, _, minor = str(text).partition(".")
    return None if text is None else (int(major), int(minor))


def _scaled(figure: object, unit: float) -> float | None:
    return figure * unit if isinstance(figure, int | float) else None


def find_gpu(name: str, field: str = "--gpu") -> Gpu:
    """Return the GPU whose name or alias is `name`.

    The comparison ignores case, spaces, dashes, a leading "NVIDIA" or "GeForce", and the B of "80GB".

    The name `cpu` means the local machine's CPU. The name `auto` means its first NVIDIA GPU, or its CPU if it
    has no NVIDIA GPU.

    Args:
        name: name or alias of the GPU.
        field: name of the option that gave the name, for error messages.

    Raises:
        DeploymentError: the catalogue has no such GPU.
    """
    wanted = _plain(name)
    if wanted == "cpu":
        return Gpu("cpu", (), "host", "cpu", host_memory(), "reported", "this machine")
    if wanted == "auto":
        return local_gpu()
    if wanted in _by_name():
        return _by_name()[wanted]
    every = ", ".join(("cpu", "auto", *(gpu.name for gpu in catalogue())))
    if wanted in ("list", "help", "all"):
        raise DeploymentError(f"{name!r} is not the name of a GPU", field=field, hint=f"one of {every}")
    count, cross, one = wanted.partition("x")
    if cross and count.isdigit() and one in _by_name():
        raise DeploymentError(
            f"{name[:60]!r} names {count} GPUs; here --gpu names one", field=field,
            hint=f"--gpu {_by_name()[one].name} --tensor-parallel-size {count}; "
            f"for tonnage train --gpus {count}",
        )  # fmt: skip
    from difflib import get_close_matches  # lazy import, only for an error message

    known = {one.lower(): gpu.name for gpu in catalogue() for one in (gpu.name, *gpu.aliases)}
    found = get_close_matches(name.lower(), known, 6, 0.5)
    close = ", ".join(list(dict.fromkeys(known[one] for one in found))[:3])
    give = "give --device-memory with the total that its driver reports"
    hint = f"did you mean {close}? For another GPU {give}" if close else f"{give}, or one of {every}"
    raise DeploymentError(f"{name[:60]!r} is not in the catalogue", field=field, hint=hint)


def gpu_named(name: str | None) -> Gpu | None:
    """Return the GPU of the catalogue whose name or alias is `name`, or None for any other device."""
    return _by_name().get(_plain(name)) if name else None


def capability_of(name: str | None) -> tuple[int, int] | None:
    """Return the CUDA compute capability (major, minor) of a catalogue GPU, None for any other device."""
    found = gpu_named(name)
    return found.capability if found else None


def is_amd(name: str | None) -> bool:
    """Return whether a GPU of the catalogue is an AMD GPU."""
    found = gpu_named(name)
    return found is not None and found.vendor == "amd"


# Compute capabilities of GPUs that share the host's memory (Orin, Thor, GB10). vLLM measures their free memory
# as the host's available memory (MemorySnapshot.measure in utils/mem_utils.py, 0.32).
_UNIFIED = ((8, 7), (11, 0), (12, 1))


def shares_memory(name: str | None) -> bool:
    """Return whether a GPU of the catalogue uses the host's memory instead of its own."""
    found = gpu_named(name)
    return found is not None and (found.vendor == "apple" or found.capability in _UNIFIED)


@cache
def _by_name() -> dict[str, Gpu]:
    return {_plain(name): gpu for gpu in catalogue() for name in (gpu.name, *gpu.aliases)}


@cache  # The result is cached because a sweep looks up each GPU a hundred times.
def _plain(name: str) -> str:
    """Return a GPU's name in a form for comparison.

    It is in lower case, without separators, a leading "nvidia" or "geforce", and the b of a final "gb".
    """
    plain = "".join(c for c in name.lower() if c.isalnum())
    plain = plain.removeprefix("nvidia").removeprefix("geforce")
    return plain[:-1] if plain[-3:-2].isdigit() and plain.endswith("gb") else plain


# Files that exist if an NVIDIA driver is installed, on Linux and on the Windows Subsystem for Linux
_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


def local_gpu() -> Gpu:
    """Return the local machine's first NVIDIA GPU, or its CPU if it has no NVIDIA GPU.

    Raises:
        DeploymentError: a driver is installed but does not answer, or nvidia-ml-py is missing.
    """
    try:
        import pynvml
    except ImportError:
        if any(Path(path).exists() for path in _DRIVER):
            raise DeploymentError(
                "auto asks the NVIDIA driver through the package nvidia-ml-py, which is not installed",
                field="--gpu",
                hint="pip install 'tonnage[gpu]', or name the GPU, for example --gpu h100-80g",
            ) from None  # fmt: skip
        return find_gpu("cpu")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # without a driver the machine has no usable NVIDIA GPU
        return find_gpu("cpu")
    try:
        if not pynvml.nvmlDeviceGetCount():
            return find_gpu("cpu")
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = str(pynvml.nvmlDeviceGetName(handle))
        if shares_memory(name):  # NVML reports no memory for GPUs that share the host's memory
            return _by_name()[_plain(name)]
        # Version 2 of nvmlDeviceGetMemoryInfo states the driver's reserved memory separately. Total minus
        # reserved is what CUDA reports.
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        total = int(memory.total - memory.reserved)
    except pynvml.NVMLError as error:
        raise DeploymentError(
            f"the NVIDIA driver does not report the memory of the GPU: {error}", field="--gpu",
            hint="name the GPU, or give --device-memory",
        ) from None  # fmt: skip
    finally:
        pynvml.nvmlShutdown()
    return Gpu(name, (), "nvidia", "cuda", total, "reported", "nvidia-ml-py")
