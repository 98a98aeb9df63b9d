"""What a step computes, who waits, who is preempted: decided here, for replay and for every engine of ours.

No clock, no tensors, no randomness: arrival times and tokens come in, chunks and block copies go out. The HF
engine, the fake engine and the replay of a trace supply *compute* (tokens drawn, who has ended) and *clock*, so
that what a replay says is what a server does, step by step (tests/server/test_one_step_loop.py).

One step, in order (`scheduler.Scheduler.step`):

1. the running sequences ask for blocks under the token budget: decodes first, then chunks of prompts. The
   budget of those that stall is offered to the next;
2. where the mode preempts, and has to, sequences lose their blocks and wait again, what they said included;
3. unless somebody was preempted in this step, those that wait are admitted while budget is left, and compute
   their first chunk at once.

Then the engine performs the copies, computes, and says so (`computed`, `fork`, `append`, `end`).

=============== =====================================================================================
``sequence``    a sequence; the step, its decisions, the counters
``queue``       who is asked next, who may pass, when a newcomer would start
``scheduler``   the step; owns running and waiting sequences; the only caller of the manager's verbs
=============== =====================================================================================
"""

from tonnage.cache.scheduler.queue import Waiting, WaitingQueue
from tonnage.cache.scheduler.scheduler import Scheduler
from tonnage.cache.scheduler.sequence import Counters, Decisions, S, Sequence, Step

__all__ = [
    "Counters",
    "Decisions",
    "S",
    "Scheduler",
    "Sequence",
    "Step",
    "Waiting",
    "WaitingQueue",
]
