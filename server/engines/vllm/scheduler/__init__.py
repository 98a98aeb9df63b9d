"""Tonnage's admission inside vLLM.

Start it with ``vllm serve MODEL --scheduler-cls tonnage.server.engines.vllm.scheduler.TonnageScheduler``.

=============== ==================================================================================
``scheduler``   `TonnageScheduler`: hides requests that may not take part in a step from vLLM
``admission``   which requests start and which skip a step: `tonnage.cache.admission` with vLLM's figures
``account``     the blocks that running requests hold and may still need
``groups``      vLLM's KV cache groups in the terms of admission
``options``     ``--additional-config '{"tonnage": {...}}'`` and ``TONNAGE_*``
``versions``    names that differ between vLLM 0.30 and 0.33
``own``         vLLM's own scheduler, for an unknown version of vLLM
``ours``        the scheduler of ``tonnage serve --backend vllm``, with bounded grammars
``sharing``     system prompts whose blocks are shared between cache salts
``report``      counts and blocks for our metrics
``pool``        vLLM's cached blocks and their evictions
``step_times``  the duration of each step
=============== ==================================================================================
"""

import vllm

from tonnage.server.engines.vllm.scheduler.own import OwnScheduler
from tonnage.server.engines.vllm.scheduler.versions import rules_of

if rules_of(vllm.__version__) is None:  # an unknown vLLM may lack names that `scheduler` imports
    TonnageScheduler: type = OwnScheduler
else:
    from tonnage.server.engines.vllm.scheduler.scheduler import TonnageScheduler

__all__ = ["TonnageScheduler"]
