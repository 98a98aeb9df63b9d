"""The scheduler of ``tonnage serve --backend vllm``: that of a plain ``vllm serve``, and what the API process
in front of it relies on. Runs inside vLLM's engine core."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tonnage.server.engines.vllm.arguments import BACKEND
from tonnage.server.engines.vllm.scheduler.own import config_of, warn
from tonnage.server.engines.vllm.scheduler.sharing import Sharing
from tonnage.server.engines.vllm.scheduler.versions import rules_of


class BackendScheduler(AsyncScheduler):
    """For ``scheduler_cls``: makes one of the parts that the additional config asks for."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        config = config_of(args, named)
        parts = _admission(asynchronous=config.scheduler_config.async_scheduling)
        wanted = config.additional_config[BACKEND]
        if wanted["prefixes"]:
            parts = (Sharing, *parts)
        if wanted["grammars"]:
            from tonnage.server.engines.vllm.grammars import Bounded  # llguidance, which is optional

            parts = (Bounded, *parts)
        return type(cls.__name__, parts, {"__module__": __name__})(*args, **named)


def _admission(*, asynchronous: bool) -> tuple[type, ...]:
    """The scheduler that admits; of a vLLM that nobody knows its own."""
    if rules_of(vllm.__version__) is None:
        warn()
        return (AsyncScheduler if asynchronous else Scheduler,)
    # Imports names that an unknown vLLM may lack.
    from tonnage.server.engines.vllm.scheduler.scheduler import TonnageScheduler, TonnageSyncScheduler

    return (TonnageScheduler if asynchronous else TonnageSyncScheduler,)
