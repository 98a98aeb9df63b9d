"""Bodies of /pooling and /classify, which are vLLM's (entrypoints/pooling of vLLM 0.32)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from tonnage.server.api.body import Fields
from tonnage.server.api.embeddings.protocol import INPUT_EXPECTED, InputBody
from tonnage.server.api.fields import CLASSIFICATION, POOLING
from tonnage.server.api.pooling_answer import PoolingAnswer
from tonnage.server.engines.request import PoolingTask


class ClassificationRequest(InputBody):
    """Body of POST /classify: the texts or token ids to classify."""


class PoolingRequest(InputBody):
    """Body of POST /pooling: the texts or token ids to pool, and the format of the results.

    ``task`` must be the pooling task of the model (embed, classify ...); None selects that task.
    """

    task: PoolingTask | None = None
    encoding_format: Literal["float", "base64"] | None = None


CLASSIFICATION_FIELDS = Fields(ClassificationRequest, CLASSIFICATION, {"input": INPUT_EXPECTED})
POOLING_FIELDS = Fields(PoolingRequest, POOLING, {"input": INPUT_EXPECTED})


class Classification(BaseModel):
    """The label of one input (None if config.json does not name it), and the model's value for every label."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(PoolingAnswer):
    """The complete answer of /classify, with one classification per input."""

    data: list[Classification]


class PooledData(BaseModel):
    """The result of one input: one vector, one vector per token, or base64 of little-endian 32-bit floats."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | list[list[float]] | str


class PooledList(PoolingAnswer):
    """The complete answer of /pooling, with one result per input."""

    data: list[PooledData]
