"""Memory of the grammars of answers (server/engines/grammars), with any engine that llguidance matches for.

llguidance keeps the tokenizer of the demo model in 35 MiB; the process that tries grammars holds 11 MiB. The
rest are limits that the engine keeps to: of all grammars it matches, and of each of those being tried, whose
process begins as a copy of the other.
"""

from __future__ import annotations

from tonnage.planner.units import MiB

GRAMMAR_TOKEN_BYTES = 750
GRAMMAR_PROCESS_BYTES = 12 * MiB
GRAMMARS_BYTES = 32 * MiB
GRAMMAR_TRIALS = 2
GRAMMAR_TRIAL_BYTES = 24 * MiB
# Of the plan, what is held only while grammars are matched and tried.
GRAMMAR_LIMIT_BYTES = GRAMMARS_BYTES + GRAMMAR_TRIALS * (GRAMMAR_PROCESS_BYTES + GRAMMAR_TRIAL_BYTES)
