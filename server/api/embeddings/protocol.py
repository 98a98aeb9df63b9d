"""Bodies of /v1/embeddings: OpenAI's fields and the honoured extensions of vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from tonnage.server.api.body import Fields
from tonnage.server.api.fields import EMBEDDING
from tonnage.server.api.pooling_run import EmbeddingUsage
from tonnage.server.api.sampling import AtLeastOne, EngineBody, TokenId

MAX_INPUTS = 2048  # OpenAI's limit of the inputs in one request (API reference of embeddings, "input")

Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Lists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class InputBody(EngineBody):
    """Base class of the bodies for pooling models that have one input, or a list of independent inputs."""

    input: Text | Texts | TokenIds | Lists
    use_activation: bool | None = None


class EmbeddingRequest(InputBody):
    """Body of POST /v1/embeddings: the texts or token ids to embed, and the format of the vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: AtLeastOne | None = None


INPUT_EXPECTED = f"a string, a list of token ids, or a list of at most {MAX_INPUTS} of either"

FIELDS = Fields(model=EmbeddingRequest, table=EMBEDDING, expected={"input": INPUT_EXPECTED})


class Embedding(BaseModel):
    """The embedding of one input, as a list of floats or as base64 of little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The complete answer of /v1/embeddings, with one embedding per input."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
