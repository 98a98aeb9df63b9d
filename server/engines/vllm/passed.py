"""What has passed its trial, on its way from the API process to vLLM's engine core."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tonnage.server.text.grammar import Grammar

# The stop_reason of an answer whose text is complete and that no stop token can end.
COMPLETE = "its text is complete"


@dataclass(frozen=True, slots=True)
class Passed:
    """``grammar``: its kind, and its text in llguidance's words (a structural tag: its own). ``bytes``: what it
    took in its trial. ``tenant``: whose turn it is when masks are computed."""

    grammar: Grammar
    bytes: int
    tenant: str

    def encode(self) -> str:
        """As the text of a grammar, which vLLM hands on."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Passed:
        said = json.loads(text)
        return cls(Grammar(**said["grammar"]), said["bytes"], said["tenant"])
