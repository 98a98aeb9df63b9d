"""Comparison of the plan with the machine: available memory before the load, measured memory after it."""

from __future__ import annotations

from tonnage.planner.errors import DoesNotFit
from tonnage.planner.plans import Plan

SMALLER = "lower --kv-cache-memory-bytes, --max-num-seqs or --max-num-batched-tokens"


def gib(count: int) -> str:
    """Return a number of bytes as text, in bytes and in GiB."""
    return f"{count:,} bytes ({count / 2**30:.2f} GiB)"


def available_memory() -> int:
    """Return the bytes of the machine's memory available without swapping (MemAvailable, proc_meminfo(5))."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise DoesNotFit("/proc/meminfo has no MemAvailable", field="device", hint="use Linux 3.14 or newer")


def require_available(plan: Plan, available: int) -> None:
    """Raise DoesNotFit if the plan needs more than the ``available`` bytes of the machine's memory."""
    needed = plan.rank.used_bytes
    if needed > available:
        raise DoesNotFit(
            f"the plan needs {gib(needed)}; other programs leave {gib(available)} of this machine's memory",
            field="device_memory",
            hint=f"stop some of them, or {SMALLER}",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that an allocator ran out of memory.

    It recognizes MemoryError, torch.OutOfMemoryError, and two messages of RuntimeError:

    - "DefaultCPUAllocator: can't allocate memory" (torch 2.13, c10/core/impl/alloc_cpu.cpp).
    - "can't start new thread" (CPython 3.11, Modules/_threadmodule.c): the thread's stack could not be mapped.
    """
    said = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (
            isinstance(error, RuntimeError | OSError)
            and any(text in said for text in ("allocate memory", "out of memory", "can't start new thread"))
        )
    )


def out_of_memory(plan: Plan, error: BaseException) -> DoesNotFit:
    """Return the error for a model load that ran out of memory, with planned and available bytes."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DoesNotFit(
        f"out of memory while loading ({first[:200]}); the plan needs {gib(plan.rank.used_bytes)} of "
        f"{gib(plan.rank.total_bytes)}, available now {gib(available_memory())}",
        field="device_memory",
        hint=f"stop other programs, raise the memory limit of this process, or {SMALLER}",
    )


def require_fits(forecast: Plan, measured: Plan) -> None:
    """Raise DoesNotFit if the memory measured after the load exceeds the device's memory.

    Args:
        forecast: plan made before the load.
        measured: the same plan with measured instead of forecast bytes.
    """
    rank, before = measured.rank, forecast.rank
    if rank.used_bytes <= rank.total_bytes:
        return
    terms = ", ".join(
        f"{name} {gib(value)} (planned {gib(planned)})"
        for name, value, planned in (
            ("weights", rank.weights_bytes, before.weights_bytes),
            ("KV pool", rank.kv_pool_bytes, before.kv_pool_bytes),
            ("activations", rank.activation_bytes, before.activation_bytes),
            ("framework", rank.framework_bytes, before.framework_bytes),
        )
    )
    raise DoesNotFit(
        f"the memory measured after the load exceeds the device's memory: {terms}; the sum is "
        f"{gib(rank.used_bytes)}, and the device has {gib(rank.total_bytes)}",
        field="device_memory",
        hint=SMALLER,
    )
