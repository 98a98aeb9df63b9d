"""Creation of vLLM's AsyncLLM, with a stat logger that collects the messages of its engine cores.

Written against vLLM 0.32. vLLM is not imported before `load`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tonnage.planner.errors import DeploymentError
from tonnage.server.engines.imports import no_collections
from tonnage.server.engines.vllm.core_stats import EngineCores


def load(arguments: dict[str, Any], cores: EngineCores, wanted: Callable[[], bool]) -> Any:
    """Create vLLM's AsyncLLM from the AsyncEngineArgs in `arguments`; the call takes 30 s or more.

    Args:
        arguments: keywords of AsyncEngineArgs.
        cores: collector of the engine cores' statistics.
        wanted: function that returns False if the start was cancelled; called after vLLM was imported.

    Raises:
        DeploymentError: vLLM is not installed, or the start was cancelled.
    """
    try:
        with no_collections():
            from vllm.config.kv_events import KVEventsConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.renderers import hf as renderers
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.metrics.loggers import StatLoggerBase
            from zmq.utils.garbage import gc as collector
    except ImportError as error:
        raise DeploymentError(
            f"vLLM cannot be imported: {error}",
            field="backend",
            hint="pip install vllm on a GPU machine, or 'tonnage[vllm]' for a CPU",
        ) from None
    if not wanted():
        raise DeploymentError("the server was stopped while vLLM was imported", field="backend")

    class Listener(StatLoggerBase):
        """A vLLM stat logger that passes the statistics of each step to `cores`, the collector of all cores.

        vLLM calls it before the stat loggers of plug-ins. Our plug-in's logger removes the values that this one
        reads.
        """

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            # Divide by the number of engine cores: in the client's config, the number of blocks is the sum over
            # all cores, because each core's handshake adds its own (v1/engine/core_client.py, 0.32).
            engines = vllm_config.parallel_config.data_parallel_size
            cores.join(engine_index, vllm_config.cache_config.num_gpu_blocks // engines)
            self._index = engine_index

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            """Pass the statistics of one engine core's step to the collector."""
            cores.record(self._index, scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Do nothing when vLLM reports that the engine has started."""

    # vLLM would copy the tokenizer for the threads that render prompts (120 MiB a copy with a vocabulary of
    # 262,144). No copy is needed: prompts are token ids here, and only the event loop uses the tokenizer.
    vars(renderers)["maybe_make_thread_pool"] = lambda tokenizer, copies=1: tokenizer
    if (events := arguments.get("kv_events_config")) is not None:
        arguments = arguments | {"kv_events_config": KVEventsConfig(**asdict(events))}
    before = os.environ.copy()
    try:
        with no_collections():
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Listener])
    finally:
        # Remove the variables that vLLM sets in this process for its children (LD_PRELOAD, thread counts).
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    if not collector.is_alive():
        # pyzmq starts its thread for zero-copy messages at the first message of 64 KiB. Start it now, so that
        # no request has to open the thread's seven files.
        collector.start()
    return llm
