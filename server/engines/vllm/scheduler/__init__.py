"""Tonnage's admission inside vLLM.

``vllm serve MODEL --scheduler-cls tonnage.server.engines.vllm.scheduler.TonnageScheduler``

=============== ==================================================================================
``scheduler``   `TonnageScheduler`: takes out who may not take part in a step, asks vLLM, puts back
``admission``   who may start, who sits a step out: `tonnage.cache.admission` asked with vLLM's figures
``account``     what the running requests hold and may still ask for, beside vLLM's books
``groups``      vLLM's KV cache groups as admission counts them
``options``     ``--additional-config '{"tonnage": {...}}'`` and ``TONNAGE_*``
``versions``    what vLLM calls by another name in 0.30 to 0.33
``own``         vLLM's own scheduler, where its version is another one
``ours``        the same behind ``tonnage serve --backend vllm``, with bounded grammars
``sharing``     system prompts whose blocks every cache salt shares
=============== ==================================================================================
"""

import vllm

from tonnage.server.engines.vllm.scheduler.own import OwnScheduler
from tonnage.server.engines.vllm.scheduler.versions import rules_of

if rules_of(vllm.__version__) is None:  # it may lack names that we import
    TonnageScheduler: type = OwnScheduler
else:
    from tonnage.server.engines.vllm.scheduler.scheduler import TonnageScheduler

__all__ = ["TonnageScheduler"]
