"""Step `device`: driver, capability and memory of the device, compared with the catalogue's entry."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator

import torch

from tonnage.planner.devices.catalogue import Gpu, catalogue
from tonnage.planner.devices.host import cpu_features, host_memory
from tonnage.planner.units import GiB

from .models import Target
from .rows import INFO, OFF, OK, Row, skipped

# A published total that differs from the driver's by less than this share is the same figure, rounded.
_ROUNDING = 0.002


def entry_of(name: str, total: int) -> Gpu | None:
    """Return the catalogue's GPU for a device name as torch reports it, for example "NVIDIA H100 80GB HBM3".

    A model that exists with several memory sizes is told apart by ``total``, the device's bytes.
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    found: list[tuple[int, int, Gpu]] = []
    for gpu in catalogue():
        model, *parts = gpu.name.split("-")
        variants = [part for part in parts if not part[0].isdigit()]  # such as pcie; sizes are compared below
        if gpu.vendor == "nvidia" and model in plain and all(variant in plain for variant in variants):
            found.append((len(model) + len("".join(variants)), -abs(gpu.memory_bytes - total), gpu))
    return max(found, key=lambda each: each[:2])[2] if found else None


def run(target: Target) -> Iterator[Row]:
    """Yield what torch, NVML and the driver report of the device."""
    yield Row(
        "Python, torch, system", f"{platform.python_version()}, {torch.__version__}, {platform.platform()}"
    )
    if target.device == "cpu":
        features = ", ".join(sorted(cpu_features() & {"avx2", "avx512f", "avx512_bf16", "amx_tile"}))
        yield Row("instruction sets", features or "none of AVX2, AVX-512, AMX")
        yield Row("memory of this process", host_memory(), "bytes")
        yield skipped("catalogue entry", "the device is a CPU")
        return
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    yield Row("name", name)
    yield Row("compute capability", f"{capability[0]}.{capability[1]}")
    yield Row("CUDA of torch", str(torch.version.cuda))
    yield Row("free memory (torch)", free, "bytes")
    entry = entry_of(name, total)
    if entry is None:
        yield Row(
            "total memory (torch)", total, "bytes", note="the catalogue has no such GPU: give --device-memory"
        )
    else:
        same = abs(total - entry.memory_bytes) <= _ROUNDING * total
        note = f"{entry.name}, {entry.basis} ({entry.source})"
        yield Row(
            "total memory (torch)", total, "bytes", entry.memory_bytes, verdict=OK if same else OFF, note=note
        )
        fits = entry.capability == capability
        yield Row("catalogue's capability", str(entry.capability), verdict=OK if fits else OFF)
    yield _driver()


def _driver() -> Row:
    """Return the driver's version and its own memory figures, as nvidia-smi prints them."""
    fields = "driver_version,memory.total,memory.reserved,memory.used,ecc.mode.current"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return skipped("driver (nvidia-smi)", f"{type(error).__name__}: {error}"[:200])
    return Row(
        "driver, total, reserved, used, ECC (nvidia-smi)", answer.stdout.strip().splitlines()[0], verdict=INFO
    )


def gib(size: int) -> str:
    """Return bytes as GiB with two decimals."""
    return f"{size / GiB:.2f} GiB"
