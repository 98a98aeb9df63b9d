"""The scheduler of `tonnage serve --backend vllm`, which runs inside vLLM's engine core.

It adds bounded grammars and shared prefixes to the scheduler that Tonnage has for a plain `vllm serve`.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tonnage.server.engines.vllm.arguments import BACKEND
from tonnage.server.engines.vllm.scheduler.fallback import config_of, warn_unknown_version
from tonnage.server.engines.vllm.scheduler.shared_prefixes import SharedPrefixes
from tonnage.server.engines.vllm.scheduler.versions import names_of


class BackendScheduler(AsyncScheduler):
    """A factory for vLLM's `scheduler_cls` that builds a scheduler with the configured features.

    The features are selected by the additional config: bounded grammars and shared prefixes.
    """

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """Create a scheduler with admission and with the features that `additional_config` selects."""
        config = config_of(args, named)
        parts = _admission(asynchronous=config.scheduler_config.async_scheduling)
        wanted = config.additional_config[BACKEND]
        if wanted["prefixes"]:
            parts = (SharedPrefixes, *parts)
        if wanted["grammars"]:
            # Imported here, because grammars need llguidance, which is optional.
            from tonnage.server.engines.vllm.grammars import BoundedGrammars

            parts = (BoundedGrammars, *parts)
        return type(cls.__name__, parts, {"__module__": __name__})(*args, **named)


def _admission(*, asynchronous: bool) -> tuple[type, ...]:
    """Return the scheduler class with admission, or vLLM's own class if vLLM's version is unknown."""
    if names_of(vllm.__version__) is None:
        warn_unknown_version()
        return (AsyncScheduler if asynchronous else Scheduler,)
    # Imported here, because an unknown vLLM may lack names that this module imports.
    from tonnage.server.engines.vllm.scheduler.scheduler import TonnageScheduler, TonnageSyncScheduler

    return (TonnageScheduler if asynchronous else TonnageSyncScheduler,)
