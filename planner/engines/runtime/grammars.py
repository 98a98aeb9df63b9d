"""Memory of structured-output grammars (server/engines/grammars), for every engine that uses llguidance.

llguidance's tokenizer of the demo model takes 35 MiB. The grammar process takes 11 MiB. It forks a process for
each grammar, which compiles it within limits, before the engine itself compiles the grammar. The other
constants are limits that the engine enforces: on the memory of all active grammars together, on the number of
these forks at a time, and on the memory of each fork.
"""

from __future__ import annotations

from tonnage.planner.units import MiB

GRAMMAR_TOKEN_BYTES = 750
GRAMMAR_PROCESS_BYTES = 12 * MiB
GRAMMARS_BYTES = 32 * MiB
GRAMMAR_TRIALS = 2
GRAMMAR_TRIAL_BYTES = 24 * MiB
# Upper bound in bytes of the memory that is held only while grammars are active or being compiled.
GRAMMAR_LIMIT_BYTES = GRAMMARS_BYTES + GRAMMAR_TRIALS * (GRAMMAR_PROCESS_BYTES + GRAMMAR_TRIAL_BYTES)
