"""vLLM's processes: which they are, when they hang, and how they are ended. Written against vLLM 0.32."""

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

from tonnage.server.engines import stillness
from tonnage.server.engines.process_memory import process_tree

# Clock ticks a second that a vLLM process may use while it waits. A worker's main thread looks at its queue
# every 5 s (distributed/device_communicators/shm_broadcast.py, 0.32): measured 1 tick in 36 s, with its engine
# core stopped. (Its gloo threads turn all the time: 2.2 a second.) One at work has 4 and more (stillness.py).
PARKED_TICKS = 0.2
# Until an engine core that is asked to end while it loads is ended: vLLM's own grace (v1/utils.py, 0.32).
_GRACE_SECONDS = 5.0
# vLLM's thread that waits for the end of its cores (v1/engine/core_client.py, 0.32).
_MONITOR = "MPClientEngineMonitor"


async def hang(heard: Callable[[], int], limit: Callable[[], int | None]) -> tuple[list[int], float]:
    """Returns once there are engine cores and they have been still for ``limit()`` looks: their process ids and
    the seconds that was. Arguments as ``tonnage.server.engines.stillness.still``'s."""
    while not (cores := _engine_cores()):  # noqa: ASYNC110 -- vLLM tells nobody
        await asyncio.sleep(stillness.LOOK_SECONDS)
    watched = stillness.Stillness(*cores, main_threads=True, parked=PARKED_TICKS)
    return cores, await stillness.still(watched, heard, limit)


async def interrupt_loading(loading: Future[Any]) -> None:
    """A thread cannot be cancelled, but it gives up as soon as the child it waits for is gone."""
    asked = time.monotonic()
    while not loading.done():
        if time.monotonic() - asked > _GRACE_SECONDS:  # it hangs
            kill(_engine_cores())
        for child in _engine_cores():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        await asyncio.sleep(0.1)


def shut_down(llm: Any, *, at_once: bool) -> None:
    """End the processes of an AsyncLLM; ``at_once`` where there is no device to leave in order. For a thread.

    vLLM 0.32 gives them 5 s and then kills them; on a CPU that is what it comes to, because a worker takes as
    long to take its heap apart (2 s of processor time, on two quiet cores).
    """
    import psutil  # vLLM's

    logger = logging.getLogger("vllm")
    level = logger.level
    if at_once:
        logger.setLevel(logging.ERROR)  # it warns of the force that it is asked for
    try:
        llm.shutdown(timeout=0 if at_once else None)
    except psutil.NoSuchProcess:  # it asks whom it kills for a name, and that one has just ended
        kill(_engine_cores())  # what it did not come to
    finally:
        logger.setLevel(level)


def close_files(llm: Any) -> None:
    """Of an AsyncLLM that is shut down, in a later turn of its loop (in which it closes its sockets): its ZMQ
    context, and what its ended processes leave here, a zombie and two pipes each. vLLM 0.32 leaves them to the
    garbage collector (v1/engine/core_client.py: BackgroundResources).
    """
    held = llm.engine_core.resources
    with contextlib.suppress(AttributeError):  # what the first time has deleted
        held()  # once more: an error on its way, here or in vLLM's own thread, leaves the sockets open
    held.ctx.destroy(linger=0)
    for thread in threading.enumerate():
        if thread.name == _MONITOR:  # it looks at the processes
            thread.join(_GRACE_SECONDS)
    for process in held.engine_manager.processes:
        process.join(_GRACE_SECONDS)
        with contextlib.suppress(ValueError):  # not ended even so: left to the garbage collection
            process.close()


def kill(pids: list[int]) -> None:
    """With their descendants: a stopped one cannot notice that its parent is gone."""
    for member in [member for pid in pids for member in process_tree(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def _engine_cores() -> list[int]:
    """Process ids of vLLM's engine cores, children of this process."""
    children = multiprocessing.active_children()
    return [child.pid for child in children if child.pid and child.name.startswith("EngineCore")]
