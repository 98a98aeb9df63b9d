"""The message that carries a checked grammar from the API process to vLLM's engine core."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tonnage.server.text.grammar import Grammar

# The stop_reason of a sequence whose text matches the whole grammar and that no stop token can end.
COMPLETE = "its text is complete"


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that compiled within its limits in the trial process.

    Attributes:
        grammar: its kind, and its text in llguidance's syntax (a structural tag keeps its own syntax).
        bytes: memory that it took in its trial.
        tenant: tenant whose share of the mask budget it uses.
    """

    grammar: Grammar
    bytes: int
    tenant: str

    def encode(self) -> str:
        """Return the message as the text of a grammar, which vLLM passes on unchanged."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> CheckedGrammar:
        """Return the grammar that `encode` wrote."""
        said = json.loads(text)
        return cls(Grammar(**said["grammar"]), said["bytes"], said["tenant"])
