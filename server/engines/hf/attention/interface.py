"""Attention over the paged pool, registered with transformers under one name.

Behind one call: ``in_place`` reads bfloat16 blocks where they lie (CPU), the kernels of ``cuda`` do so
on a GPU, ``gather`` is plain torch for every device and dtype and the reference of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tonnage.cache.admission import Limits
from tonnage.server.engines.hf.attention import cuda, in_place
from tonnage.server.engines.hf.attention.gather import Attention, Backend, GatherAttention
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.pool import PagedPool

NAME = "tonnage_paged"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An implementation by name; ``load`` prepares it and gives what makes a step's attention of its batch."""

    name: str
    load: Callable[[], Backend]


def candidates(
    pool: PagedPool, query_heads: int, threads: int, dtype: torch.dtype, limits: Limits
) -> list[Candidate]:
    """Implementations for this pool of a model that computes in ``dtype``, best first; the reference last."""
    found = []
    if pool.tensor.device.type == "cuda":
        for name in cuda.usable(pool, dtype):
            found.append(Candidate(name, partial(cuda.load, name, pool, limits)))
    elif dtype == torch.bfloat16 and in_place.serves(pool):
        scratch = in_place.Scratch(pool, threads)

        def attention_in_place(batch: Batch) -> Attention:
            return in_place.InPlaceAttention(batch, pool, query_heads, scratch)

        found.append(Candidate("in place", lambda: attention_in_place))
    return [*found, Candidate("gather", lambda: lambda batch: GatherAttention(batch, pool, query_heads))]


class PagedBatch:
    """One step's attention, and how often the model has called it."""

    def __init__(self, attention: Attention, pool: PagedPool) -> None:
        self.attention = attention
        self.place = pool.place
        self.calls = 0


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    paged_batch: PagedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in each layer.

    ``query`` [1, heads, T, size], ``key`` and ``value`` [1, KV heads, T, size];
    returns [1, T, heads, size]. Windows come from the layout, not from the keyword of the same name.
    """
    if paged_batch is None:
        raise RuntimeError("this model does not hand its keyword arguments down to attention")
    group, slot = paged_batch.place[module.layer_idx]  # type: ignore[index]
    paged_batch.calls += 1
    output = paged_batch.attention(
        group,
        slot,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap,
    )
    return output[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """Masks are built from block tables, once a step; transformers need not build its own."""
    return None


def register() -> None:
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
