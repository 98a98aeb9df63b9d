"""The message that carries a checked grammar from the API process to vLLM's engine core.

A checked grammar has compiled within its time and memory limits in a child process of the API process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tonnage.server.text.grammar import Grammar

# The stop_reason of a sequence that ends because its text matches the whole grammar, without a stop token.
COMPLETE = "its text is complete"


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that compiled within its time and memory limits in a child process of the API process.

    Attributes:
        grammar: kind and text of the grammar, converted to llguidance's syntax. A structural tag keeps its own
            syntax.
        bytes: memory in bytes that the child process needed to compile the grammar.
        tenant: tenant of the request. Each tenant has a share of the time for computing token masks.
    """

    grammar: Grammar
    bytes: int
    tenant: str

    def encode(self) -> str:
        """Return the message as a string that vLLM accepts as a grammar and passes on unchanged."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> CheckedGrammar:
        """Return the checked grammar encoded in ``text`` by `encode`."""
        said = json.loads(text)
        return cls(Grammar(**said["grammar"]), said["bytes"], said["tenant"])
