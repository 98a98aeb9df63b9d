"""Parts of the answers that all endpoints of pooling models share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from tonnage.server.requests.submission import TokenCounts


class EmbeddingUsage(BaseModel):
    """Token counts of a request to a pooling model."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, counts: TokenCounts) -> EmbeddingUsage:
        """Return the token usage of a request to a pooling model; all of its tokens are prompt tokens."""
        return cls(prompt_tokens=counts.prompt, total_tokens=counts.prompt)


class PoolingAnswer(BaseModel):
    """Base class of vLLM's answers of pooling models, with one item in ``data`` per input."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Any]
    usage: EmbeddingUsage
