"""A device by its name: of the catalogue, or this machine's (``cpu``; ``auto`` asks nvidia-ml-py first)."""

from __future__ import annotations

from functools import cache

from tonnage.planner.devices.catalogue import Gpu, catalogue
from tonnage.planner.devices.host import host_memory
from tonnage.planner.errors import DeploymentError


def find_gpu(name: str) -> Gpu:
    """The entry of that name or alias (case, spaces and dashes aside); ``cpu`` and ``auto`` are this machine.
    Raises DeploymentError."""
    wanted = _plain(name)
    if wanted == "cpu":
        return Gpu("cpu", (), "host", "cpu", host_memory(), "reported", "this machine", None, None)
    if wanted == "auto":
        return local_gpu()
    if wanted in _by_name():
        return _by_name()[wanted]
    import difflib

    names = [gpu.name for gpu in catalogue()]
    close = difflib.get_close_matches(name.lower(), names, 3, 0.5)
    raise DeploymentError(
        f"{name[:60]!r} is not in the catalogue",
        field="--gpu",
        hint="did you mean " + ", ".join(close) + "?" if close else "one of cpu, auto, " + ", ".join(names),
    )


def capability_of(name: str | None) -> tuple[int, int] | None:
    """Compute capability of a GPU of the catalogue, None for any other device."""
    found = _by_name().get(_plain(name)) if name else None
    return found.capability if found else None


@cache
def _by_name() -> dict[str, Gpu]:
    return {_plain(name): gpu for gpu in catalogue() for name in (gpu.name, *gpu.aliases)}


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def local_gpu() -> Gpu:
    """The first NVIDIA GPU, else this machine's CPU. Raises DeploymentError when a driver is there but does
    not answer."""
    try:
        import pynvml
    except ImportError:
        return find_gpu("cpu")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: no NVIDIA GPU
        return find_gpu("cpu")
    try:
        if not pynvml.nvmlDeviceGetCount():
            return find_gpu("cpu")
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(handle)
        # version 2 counts the driver's reserve apart, as CUDA does
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        total = int(memory.total - memory.reserved)
    except pynvml.NVMLError as error:
        raise DeploymentError(
            f"the NVIDIA driver does not say what it has: {error}", field="--gpu",
            hint="name the GPU, or give --device-memory",
        ) from None  # fmt: skip
    finally:
        pynvml.nvmlShutdown()
    return Gpu(str(name), (), "nvidia", "cuda", total, "reported", "nvidia-ml-py", None, None)
