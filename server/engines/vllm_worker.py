"""Runs inside vLLM's worker process: says which bytes it holds. vLLM mixes the class into its worker
(``worker_extension_cls``) and the API process calls it through ``collective_rpc``."""

from __future__ import annotations

from typing import Any


class MemoryReport:
    """``tonnage_memory`` becomes a method of the worker."""

    model_runner: Any

    def tonnage_memory(self) -> tuple[int | None, int]:
        """Bytes of (weights and buffers, KV pool), each storage counted once.

        The first is None where linear layers keep their weights in a packed form outside of torch, as vLLM
        0.32 does on a CPU (dispatch_cpu_unquantized_gemm in model_executor/layers/utils.py): oneDNN does not
        say how large its copy is.
        """
        model = self.model_runner.model
        packed = any(hasattr(module, "cpu_linear") for module in model.modules())
        weights = None if packed else _storages([*model.parameters(), *model.buffers()])
        return weights, _storages(self.model_runner.kv_caches)


def _storages(tensors: list[Any]) -> int:
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
