"""vLLM's own scheduling where this version of vLLM is not known; imports no more of it than it must."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tonnage.server.engines.vllm.scheduler.options import read_eviction, read_policy
from tonnage.server.engines.vllm.scheduler.versions import KNOWN_VERSIONS

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


def config_of(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The VllmConfig among what vLLM makes a scheduler of."""
    return named["vllm_config"] if "vllm_config" in named else args[0]


def warn() -> None:
    """That vLLM's own rules hold."""
    logger.warning(
        "Tonnage knows vLLM %s, this is %s: vLLM schedules and evicts on its own, there is no admission",
        ", ".join(KNOWN_VERSIONS),
        vllm.__version__,
    )


class OwnScheduler(AsyncScheduler):
    """Makes vLLM's own scheduler, with a warning. Options are refused as ever."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        config = config_of(args, named)
        read_policy(config.additional_config)
        read_eviction(config.additional_config)
        warn()
        made = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        return made(*args, **named)
