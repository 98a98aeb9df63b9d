"""A fallback to vLLM's own scheduler if vLLM's version is unknown. It imports as little of vLLM as possible."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tonnage.server.engines.vllm.scheduler.options import read_eviction, read_policy
from tonnage.server.engines.vllm.scheduler.versions import KNOWN_VERSIONS

# This logger is a child of the "vllm" logger, because vLLM configures only its own loggers.
logger = init_logger(f"vllm.{__name__}")


def config_of(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the VllmConfig among the arguments of a vLLM scheduler."""
    return named["vllm_config"] if "vllm_config" in named else args[0]


def warn_unknown_version() -> None:
    """Log a warning that vLLM's version is unknown, and that vLLM schedules and evicts without Tonnage."""
    logger.warning(
        "Tonnage supports vLLM %s, this is %s: vLLM schedules and evicts on its own, without admission",
        ", ".join(KNOWN_VERSIONS),
        vllm.__version__,
    )


class FallbackScheduler(AsyncScheduler):
    """A factory that creates vLLM's own scheduler and logs a warning; invalid options still raise an error."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """Check the options of Tonnage's scheduler, and create vLLM's own scheduler."""
        config = config_of(args, named)
        read_policy(config.additional_config)
        read_eviction(config.additional_config)
        warn_unknown_version()
        made = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        return made(*args, **named)
