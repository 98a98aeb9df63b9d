"""Detection of hangs in vLLM's processes, and termination of the processes. Written against vLLM 0.32."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tonnage.server.engines import watchdog
from tonnage.server.engines.process_memory import process_tree

# Upper bound of the clock ticks of processor time per second that an idle vLLM process uses. A worker's main
# thread checks its queue every 5 s (distributed/device_communicators/shm_broadcast.py, 0.32): 1 tick in 36 s
# was measured with its engine core stopped. Its gloo threads always use 2.2 ticks per second. A busy process
# uses 4 or more (watchdog.py).
PARKED_TICKS = 0.2
# Seconds in which a loading engine core may end by itself before it is killed. It is vLLM's own limit
# (v1/utils.py, 0.32).
_GRACE_SECONDS = 5.0
# Name of vLLM's thread that waits for its engine cores to end (v1/engine/core_client.py, 0.32).
_MONITOR = "MPClientEngineMonitor"


async def wait_for_hang(
    messages: Callable[[], int], limit: Callable[[], int | None]
) -> tuple[list[int], float]:
    """Wait until vLLM's engine cores have been inactive for `limit()` consecutive checks.

    `tonnage.server.engines.watchdog.wait_until_hung` makes the checks.

    Args:
        messages: returns the number of messages received from the cores.
        limit: returns the permitted number of checks without activity, or None while the cores are idle.

    Returns:
        The process ids of the engine cores, and the seconds without activity.
    """
    while not (cores := _engine_cores()):  # noqa: ASYNC110 -- vLLM has no event for the start of its cores
        await asyncio.sleep(watchdog.CHECK_SECONDS)
    watched = watchdog.Watchdog(*cores, main_threads=True, parked=PARKED_TICKS)
    return cores, await watchdog.wait_until_hung(watched, messages, limit)


async def interrupt_loading(loading: Future[Any]) -> None:
    """End the engine cores of an AsyncLLM that is still loading, and wait until the loading thread fails.

    A thread cannot be cancelled, but it fails as soon as the child process that it waits for has ended.
    """
    asked = time.monotonic()
    while not loading.done():
        if time.monotonic() - asked > _GRACE_SECONDS:  # the engine core has not ended after SIGTERM
            kill(_engine_cores())
        for child in _engine_cores():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        await asyncio.sleep(0.1)


def shut_down(llm: Any, *, at_once: bool) -> None:
    """End the processes of vLLM's AsyncLLM. The call blocks, so make it in a thread.

    vLLM 0.32 kills its processes after 5 s. On a CPU it always reaches this limit: a worker takes that long to
    free its heap (2 s of processor time).

    Args:
        llm: the AsyncLLM.
        at_once: kill the processes without waiting; for CPUs, where the processes have no GPU to release.
    """
    import psutil  # psutil is a dependency of vLLM

    logger = logging.getLogger("vllm")
    level = logger.level
    if at_once:
        logger.setLevel(logging.ERROR)  # vLLM would warn that it kills its processes, as requested here
    try:
        llm.shutdown(timeout=0 if at_once else None)
    except psutil.NoSuchProcess:  # raised if a process ends just before vLLM reads its name
        kill(_engine_cores())  # kill the engine cores that vLLM did not end
    finally:
        logger.setLevel(level)


def close_files(llm: Any) -> None:
    """Close the ZMQ context of an AsyncLLM that is shut down, and release its ended processes.

    Each ended process leaves a zombie and two pipes, which vLLM 0.32 leaves to the garbage collector
    (v1/engine/core_client.py: BackgroundResources). Call this in a later iteration of the event loop than
    `shut_down`, because vLLM closes its sockets in that loop.
    """
    held = llm.engine_core.resources
    # Calling the resources object closes its sockets. vLLM has called it once, but an exception in that call
    # (also in vLLM's own thread) leaves sockets open, so call it again. After a call without an exception, its
    # attributes no longer exist, hence the AttributeError.
    with contextlib.suppress(AttributeError):
        held()
    held.ctx.destroy(linger=0)
    for thread in threading.enumerate():
        if thread.name == _MONITOR:  # vLLM's monitor thread still uses the processes
            thread.join(_GRACE_SECONDS)
    for process in held.engine_manager.processes:
        process.join(_GRACE_SECONDS)
        # A process that is still running is left to the garbage collector.
        with contextlib.suppress(ValueError):
            process.close()


def kill(pids: list[int]) -> None:
    """Kill the processes `pids` and all their descendants.

    Descendants are killed too, because a stopped one (SIGSTOP) would not notice that its parent has ended.
    """
    for member in [member for pid in pids for member in process_tree(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def _engine_cores() -> list[int]:
    """Return the process ids of vLLM's engine cores, which are children of this process."""
    children = multiprocessing.active_children()
    return [child.pid for child in children if child.pid and child.name.startswith("EngineCore")]
