"""Measurement of the memory of the GPU that the HF engine runs on, and waiting for the GPU's work.

The tests have no GPU. They replace `CudaMemory` by a test double that records the order of calls.
"""

from __future__ import annotations

import torch


class CudaMemory:
    """The memory of one CUDA device, as reported by torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def wait(self) -> None:
        """Wait until the GPU has finished all queued work."""
        torch.cuda.synchronize(self._device)

    def reset_peak(self) -> None:
        """Start a new measurement of the peak of GPU memory that torch has allocated."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Return the peak of GPU memory that torch has allocated since `reset_peak`, in bytes."""
        return torch.cuda.max_memory_allocated(self._device)

    def used(self) -> int:
        """Return the bytes of GPU memory that all processes take, with CUDA contexts and torch's cache."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def memory_of(device: torch.device) -> CudaMemory | None:
    """Return the object that measures a GPU's memory, or None for a CPU, where process memory is measured."""
    return CudaMemory(device) if device.type == "cuda" else None
