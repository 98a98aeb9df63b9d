"""FlashAttention on block tables: ``flash_attn`` 2 from PyPI, or the build inside vLLM for CUDA.

This module is untested on a GPU. The tests check the arguments on a CPU, with the reference attention in place
of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tonnage.server.engines.hf.attention.paged import PagedAttention
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.pool import PagedPool, on_device

Kernel = Callable[..., torch.Tensor]


def load_flash_attn() -> Kernel:
    """Load ``flash_attn_varlen_func`` of flash_attn 2.5 or later.

    The returned function takes each sequence's KV length (``seqused_k``) instead of cumulative lengths, as the
    function in vLLM's build does.
    """
    # The package is optional and for GPUs only.
    from flash_attn import flash_attn_varlen_func

    def kernel(*, seqused_k: torch.Tensor, **arguments: Any) -> torch.Tensor:
        summed = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        found: torch.Tensor = flash_attn_varlen_func(cu_seqlens_k=summed, **arguments)
        return found

    return kernel


def load_vllm() -> Kernel:
    """Load ``flash_attn_varlen_func`` from vLLM 0.32's build (vllm_flash_attn/flash_attn_interface.py).

    It uses FlashAttention 3 if the device supports it (Hopper), else FlashAttention 2.
    """
    # Imported here, because vllm is optional and for GPUs only.
    from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

    version = 3 if is_fa_version_supported(3) else 2

    def kernel(**arguments: Any) -> torch.Tensor:
        found: torch.Tensor = flash_attn_varlen_func(fa_version=version, **arguments)
        return found

    return kernel


class FlashAttention(PagedAttention):
    """The attention of one step, computed by FlashAttention from the KV pool's blocks."""

    def __init__(self, batch: Batch, pool: PagedPool, kernel: Kernel) -> None:
        super().__init__(batch, pool)
        self._kernel = kernel
        self._start = on_device(batch.query_start.astype(np.int32), self.device)
        self._tables = [on_device(np.maximum(pages.table, 0), self.device) for pages in self.pages]
        self._lengths = [on_device(pages.length, self.device) for pages in self.pages]

    def read(
        self, group: int, slot: int, query: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Return one layer's attention, by FlashAttention; see `PoolAttention.read` for the arguments."""
        k, v = self.layer(slot)
        window = self.windows[group]
        return self._kernel(
            q=query.contiguous(),
            k=k,
            v=v,
            cu_seqlens_q=self._start,
            seqused_k=self._lengths[group],
            max_seqlen_q=self.longest_query,
            max_seqlen_k=int(self.pages[group].length.max()),
            softmax_scale=scaling,
            # In both builds of FlashAttention, causal means that queries are the last tokens of the context.
            causal=True,
            # The numbers of visible tokens left and right of a query, without the query itself; -1 means all.
            window_size=[-1, -1] if window is None else [window - 1, 0],
            softcap=softcap or 0.0,
            block_table=self._tables[group],
        )
