"""Tonnage's admission inside vLLM: a scheduler class that decides which requests start in a step.

Start it with ``vllm serve MODEL --scheduler-cls tonnage.server.engines.vllm.scheduler.TonnageScheduler``.

===================== ==========================================================================================
``scheduler``         `TonnageScheduler`: hides from vLLM the requests that may not take part in a step
``admission``         which requests start and which skip a step: `tonnage.cache.admission` with vLLM's figures
``account``           the blocks that running requests hold and may still need
``groups``            vLLM's KV cache groups as admission sees them
``options``           options from ``--additional-config '{"tonnage": {...}}'`` and ``TONNAGE_*``
``report``            counts and blocks for our metrics
``pool``              vLLM's cached blocks and their evictions
``step_times``        the duration of each step
``versions``          names that differ between vLLM 0.30 and 0.33
``fallback``          vLLM's own scheduler, for an unknown version of vLLM
``backend_scheduler`` the scheduler of ``tonnage serve --backend vllm``, with bounded grammars
``shared_prefixes``   system prompts whose blocks are shared between cache salts
===================== ==========================================================================================
"""

import vllm

from tonnage.server.engines.vllm.scheduler.fallback import FallbackScheduler
from tonnage.server.engines.vllm.scheduler.versions import names_of

if names_of(vllm.__version__) is None:  # an unknown vLLM may lack names that `scheduler` imports
    TonnageScheduler: type = FallbackScheduler
else:
    from tonnage.server.engines.vllm.scheduler.scheduler import TonnageScheduler

__all__ = ["TonnageScheduler"]
