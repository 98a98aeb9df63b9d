"""The step scheduler: what a step computes, which requests wait and which are preempted, for every engine.

It has no clock, no tensors and no randomness: arrival times and tokens come in, chunks and block copies go out.
The HF engine, the fake engine and the trace replay supply the *compute* (sampled tokens, finished requests)
and the *clock*. A replay therefore takes the same decisions as a server, step by step
(tests/server/test_one_step_loop.py).

One step, in order (`scheduler.Scheduler.step`):

1. The running sequences request blocks under the token budget: decodes first, then chunks of prompts. The
   budget of a stalled sequence is offered to the next.
2. If the admission mode requires it, sequences are preempted: they lose their blocks and return to the queue
   with their output.
3. Unless a sequence was preempted in this step, waiting requests are admitted while budget is left, and compute
   their first chunk at once.

The engine then performs the copies, computes, and reports back (`computed`, `fork`, `append`, `end`).

=============== =====================================================================================
``sequence``    a sequence, a step, its decisions, and the counters
``queue``       the waiting queue: its order, and which requests may pass the head
``scheduler``   the step; it owns running and waiting sequences and is the only caller of the manager
``chunks``      where chunks of prompts end so that recurrent states can be cached
=============== =====================================================================================
"""

from tonnage.cache.scheduler.scheduler import Scheduler
from tonnage.cache.scheduler.sequence import Decisions, S, Sequence, Step

__all__ = ["Decisions", "S", "Scheduler", "Sequence", "Step"]
