"""KV offloading for a vLLM that computes on CPUs: KV blocks are copied to a tier in host memory and back.

vLLM's own worker for offloading needs a GPU (0.32, v1/kv_offload/cpu/spec.py, get_worker). With the worker of
this module, the connector, the host tier, disk tiers and their policies work where vLLM runs on CPUs:

    "kv_connector_extra_config": {"spec_name": "CpuTieringSpec",
      "spec_module_path": "tonnage.server.engines.vllm.cpu_offloading", "cpu_bytes_to_use": 17179869184}

The KV cache and the host tier are both in host memory. The host tier keeps blocks that the KV cache evicts, and
a disk tier behind the host tier survives a restart.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """A worker that copies KV blocks between the KV cache of a CPU and the KV tier in host memory.

    A copy is complete when `submit_store` or `submit_load` returns. The model computes in the same thread, so a
    store sees all K and V that earlier steps have written.

    Args:
        kv_caches: The KV cache's tensors, of shape (blocks, bytes of a block).
        blocks_per_chunk: Blocks of a chunk of the host tier.
        region: The host tier's memory.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region, self._refs, self._per_chunk = region, kv_caches.group_data_refs, blocks_per_chunk
        self._blocks: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []  # host tier: [chunks, blocks of a chunk, bytes of a block]
        for each in kv_caches.tensors:
            page = each.page_size_bytes
            self._blocks.append(each.tensor.view(torch.int8).view(-1, page))
            host = region.create_next_worker_view(page * blocks_per_chunk)
            self._chunks.append(host.view(-1, blocks_per_chunk, page))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks of the KV cache to chunks of the host tier; all are copied before the call returns."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks of the host tier to blocks of the KV cache; all are copied before the call returns."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the results of the block copies that were completed since the last call."""
        found, self._finished = self._finished, []
        return found

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing, because a block copy is complete when the method that submits it returns."""

    def shutdown(self) -> None:
        """Release the memory of the KV tier in host memory."""
        self._blocks.clear()
        self._chunks.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, spec: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool) -> bool:
        """Copy KV cache blocks to chunks of the host tier (`store`) or back.

        Blocks and chunks are listed by KV cache group. The first block of a group may lie in the middle of the
        group's first chunk. `spec.block_indices` has one value per group. Modulo the blocks per chunk, this is
        the number of blocks that precede the first block in the chunk.
        """
        assert isinstance(host, CPULoadStoreSpec)
        since, size = time.perf_counter(), 0
        blocks, chunks = torch.from_numpy(spec.block_ids).long(), torch.as_tensor(host.chunk_ids).long()
        first_block = first_chunk = 0
        for refs, count, index in zip(self._refs, spec.group_sizes, spec.block_indices, strict=True):
            if not count:
                continue
            places = torch.arange(count) + index % self._per_chunk
            chosen = blocks[first_block : first_block + count]
            chunk = chunks[first_chunk + places // self._per_chunk]
            place = places % self._per_chunk
            for ref in refs:
                kept, page = self._blocks[ref.tensor_idx], ref.page_size_bytes
                tier = self._chunks[ref.tensor_idx]
                if store:
                    tier[chunk, place, :page] = kept[chosen, :page]
                else:
                    kept[chosen, :page] = tier[chunk, place, :page]
                size += count * page
            first_block += count
            first_chunk += int(places[-1]) // self._per_chunk + 1
        self._finished.append(TransferResult(job_id, True, size, time.perf_counter() - since))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's specification of KV offloading tiers, with a worker for CPUs."""

    def create_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        """Return a worker that copies KV blocks to the host tier and back."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return CpuWorker(kv_caches, self.blocks_per_chunk, region)
        except Exception:
            region.cleanup()
            raise

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return this process's worker that copies KV blocks."""
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker
