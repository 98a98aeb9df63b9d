"""Bodies of /v1/score and /v1/rerank as in vLLM; those of rerank are also Jina's and Cohere's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from tonnage.server.api.body import Fields
from tonnage.server.api.embeddings.protocol import MAX_INPUTS, Text, Texts
from tonnage.server.api.fields import RERANK, SCORE
from tonnage.server.api.pooling_run import EmbeddingUsage, PoolingAnswer
from tonnage.server.api.sampling import EngineBody, TokenCount
from tonnage.server.errors import invalid_value

# vLLM's names of the two sides of a score request (ScoreRequest of vLLM 0.32).
SIDES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
_SIDES_EXPECTED = " or ".join(f"{first} and {second}" for first, second in SIDES)


class ScoringBody(EngineBody):
    """Base class of the bodies that score pairs of texts."""

    use_activation: bool | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_arguments(self) -> dict[str, Any]:
        """Return the variables that the request passes to a cross-encoder's template."""
        more = {} if self.instruction is None else {"instruction": self.instruction}
        return more | (self.chat_template_kwargs or {})


class ScoreRequest(ScoringBody):
    """Body of POST /v1/score: one text to score with many others, or two lists of texts of equal length."""

    queries: Text | Texts | None = None
    documents: Text | Texts | None = None
    items: Text | Texts | None = None
    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    data_1: Text | Texts | None = None
    data_2: Text | Texts | None = None

    def sides(self) -> tuple[list[str], list[str], str]:
        """Return the first and the second texts of all pairs, and the field name of the second texts.

        Raises:
            ApiError: The first or the second texts are missing, or their numbers do not match.
        """
        given = {name for pair in SIDES for name in pair if getattr(self, name) is not None}
        pairs = [pair for pair in SIDES if set(pair) == given]
        if not pairs:
            raise invalid_value(f"send {_SIDES_EXPECTED}; got {sorted(given)}", "queries")
        names = pairs[0]
        first, second = (as_list(getattr(self, name)) for name in names)
        if len(first) not in (1, len(second)):
            raise invalid_value(
                f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: send one text in {names[0]}, "
                f"or as many as in {names[1]}",
                names[0],
            )
        return first, second, names[1]


class RerankRequest(ScoringBody):
    """Body of POST /v1/rerank: a query, and the documents to sort by their relevance to it."""

    query: Text
    documents: Text | Texts
    top_n: TokenCount | None = Field(None, description="number of results; 0: all")


def as_list(texts: str | list[str]) -> list[str]:
    """Return ``texts``, which is one text or a list of texts, as a list."""
    return [texts] if isinstance(texts, str) else texts


_EXPECTED = f"a string or a list of at most {MAX_INPUTS} strings"
SCORE_FIELDS = Fields(
    model=ScoreRequest, table=SCORE, expected={name: _EXPECTED for pair in SIDES for name in pair}
)
RERANK_FIELDS = Fields(
    model=RerankRequest, table=RERANK, expected={"query": "a string", "documents": _EXPECTED}
)


class Score(BaseModel):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(PoolingAnswer):
    """The complete answer of /v1/score, with one score per pair."""

    data: list[Score]


class RerankDocument(BaseModel):
    """The text of a document, as the answer of /v1/rerank returns it."""

    text: str


class RerankResult(BaseModel):
    """A document in the answer of /v1/rerank, with its index in the request and its relevance to the query."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankList(BaseModel):
    """The complete answer of /v1/rerank: the documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
