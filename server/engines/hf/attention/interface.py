"""The attention function that transformers calls, registered under one name, and its implementations.

``in_place`` reads bfloat16 blocks on a CPU without copying them, and the kernels of ``cuda`` do so on a GPU.
``gather`` is plain torch for every device and dtype; the tests use it as the reference.
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
    """An implementation of paged attention; ``load`` returns a function from a step's batch to an attention."""

    name: str
    load: Callable[[], Backend]


def candidates(
    pool: PagedPool, query_heads: int, threads: int, dtype: torch.dtype, limits: Limits
) -> list[Candidate]:
    """Return the attention implementations that can read this KV pool, best first and the reference last.

    Args:
        pool: KV pool.
        query_heads: number of query heads of the model.
        threads: number of CPU threads.
        dtype: dtype in which the model computes.
        limits: limits of a step, for buffers of fixed size.
    """
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
    """The attention function of one step, passed to each layer, with a count of the layers' calls."""

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
    """Compute attention over the paged pool; transformers calls this function in each layer.

    Sliding windows come from the KV layout, not from a keyword argument of transformers.

    Args:
        module: the attention module, whose ``layer_idx`` is the layer index.
        query: [1, heads, T, size].
        key: [1, KV heads, T, size].
        value: [1, KV heads, T, size].
        attention_mask: not used.
        scaling: factor of the scores; None for 1 / sqrt(size).
        softcap: bound of the scores by tanh; None for no bound.
        paged_batch: the attention of this step.
        **_: not used.

    Returns:
        The attention [1, T, heads, size], and None in place of attention weights.
    """
    if paged_batch is None:
        raise RuntimeError(
            "this model does not pass its keyword arguments to attention, as paged attention requires; use "
            "--backend vllm"
        )
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
    """Return None as the attention mask; paged attention builds its masks from block tables, once per step."""
    return None


def register() -> None:
    """Register the paged attention function and its mask function with transformers."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
