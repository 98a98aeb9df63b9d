"""An AsyncLLM that tells us what its engine cores say. Written against vLLM 0.32; nothing of it is imported
before."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tonnage.planner.errors import DeploymentError
from tonnage.server.engines.imports import no_collections
from tonnage.server.engines.vllm.heard import Cores


def load(arguments: dict[str, Any], cores: Cores, wanted: Callable[[], bool]) -> Any:
    """The AsyncLLM of these AsyncEngineArgs. Blocks for half a minute and more. Raises DeploymentError where
    vLLM is not installed, or it is not ``wanted`` any more once that is imported, and whatever vLLM raises."""
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
        raise DeploymentError("was told to stop while vLLM was imported", field="backend")

    class Listener(StatLoggerBase):
        """vLLM's hook for what its scheduler says after each step. It is asked before the loggers of plug-ins,
        ours among them, which take out what it reads."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            # The handshake of an engine core writes the number it allocated into the config of the client,
            # which adds up those of all (v1/engine/core_client.py, 0.32).
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
            cores.record(self._index, scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None: ...

    # vLLM copies its tokenizer for threads that render prompts (120 MiB each with a vocabulary of 262,144).
    # Here prompts are tokens, and only the event loop asks it.
    vars(renderers)["maybe_make_thread_pool"] = lambda tokenizer, copies=1: tokenizer
    if (events := arguments.get("kv_events_config")) is not None:
        arguments = arguments | {"kv_events_config": KVEventsConfig(**asdict(events))}
    before = os.environ.copy()
    try:
        with no_collections():
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Listener])
    finally:
        # vLLM prepares its children's environment (LD_PRELOAD, thread counts) in ours.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    if not collector.is_alive():
        # pyzmq's thread for what it sends without a copy begins with the first message of 64 KiB: now, so
        # that no request opens its seven files.
        collector.start()
    return llm
