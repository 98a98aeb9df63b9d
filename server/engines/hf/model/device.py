"""Measurement of the memory of the device that the engine runs on, and waiting for the device's work.

The tests have no GPU. They replace `CudaMemory` by a test double that records the order of calls.
"""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """The memory figures of one GPU, all in bytes."""

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""

    def reset_peak(self) -> None:
        """Start a new measurement of the peak of allocated memory."""

    def peak(self) -> int:
        """Return the peak of torch's allocations since `reset_peak`."""

    def free(self) -> int:
        """Return the bytes that no process uses."""

    def used(self) -> int:
        """Return the bytes that all processes use, with CUDA contexts and memory that torch keeps unused."""


class CudaMemory:
    """The memory of one CUDA device, by torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        torch.cuda.synchronize(self._device)

    def reset_peak(self) -> None:
        """Start a new measurement of the peak of allocated memory."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Return the peak of torch's allocations since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def free(self) -> int:
        """Return the bytes that no process uses."""
        return torch.cuda.mem_get_info(self._device)[0]

    def used(self) -> int:
        """Return the bytes that all processes use, with CUDA contexts and memory that torch keeps unused."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU, or None for a CPU, whose process memory is measured instead."""
    return CudaMemory(device) if device.type == "cuda" else None
