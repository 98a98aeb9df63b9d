"""FlashInfer on block tables: planned once per step and KV cache group, run in each layer.

One wrapper serves prefill chunks and decodes together. Its prefill kernel packs the query heads that share a KV
head into one tile, as the decode wrapper does with tensor cores. It is untested on a GPU. The tests check the
arguments on a CPU, with the reference attention in place of the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tonnage.planner.engines.runtime.hf import FLASHINFER_WORKSPACE_BYTES
from tonnage.server.engines.hf.attention.paged import PagedAttention
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.pool import PagedPool, on_device


def load(pool: PagedPool) -> list[Any]:
    """Create one FlashInfer wrapper per KV cache group.

    All wrappers use one workspace, because layers run one after another.
    """
    # Imported here, because the package is optional and for GPUs only.
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.tensor.device)
    return [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for _ in pool.layout.groups]


class FlashInferAttention(PagedAttention):
    """The attention of one step, computed by FlashInfer from the KV pool's blocks."""

    def __init__(self, batch: Batch, pool: PagedPool, wrappers: list[Any]) -> None:
        super().__init__(batch, pool)
        self._wrappers = wrappers
        # FlashInfer's plan() reads the query starts on the CPU, so they are not copied to the GPU.
        self._start = torch.from_numpy(batch.query_start.astype(np.int32))
        self._planned: dict[int, tuple[float, float | None]] = {}

    def read(
        self, group: int, slot: int, query: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Return one layer's attention, by FlashInfer; see `PoolAttention.read` for the arguments."""
        # The plan is made once per group and step, because all layers of the known families have the same
        # scaling and softcap.
        if self._planned.get(group) != (scaling, softcap):
            self._plan(group, query, scaling, softcap)
            self._planned[group] = (scaling, softcap)
        found: torch.Tensor = self._wrappers[group].run(query.contiguous(), self.layer(slot))
        return found

    def _plan(self, group: int, query: torch.Tensor, scaling: float, softcap: float | None) -> None:
        layout, pages, window = self.pool.layout, self.pages[group], self.windows[group]
        used = pages.table >= 0
        start = np.concatenate(([0], np.cumsum(used.sum(1)))).astype(np.int32)
        last = (pages.length - 1) % layout.block_size + 1
        self._wrappers[group].plan(
            self._start,
            torch.from_numpy(start),
            on_device(pages.table[used], self.device),
            torch.from_numpy(last.astype(np.int32)),
            query.shape[1],
            layout.kv_heads,
            layout.head_size,
            layout.block_size,
            causal=True,
            sm_scale=scaling,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=softcap,
            q_data_type=query.dtype,
            kv_data_type=self.pool.dtype,
        )
