"""``--gpu auto``: the device of this machine, asked through nvidia-ml-py, else the CPU."""

from __future__ import annotations

from tonnage.planner.errors import DeploymentError
from tonnage.planner.gpus import Gpu, find_gpu


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
