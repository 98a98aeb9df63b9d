"""Methods for vLLM's worker processes, in a class that vLLM adds to its workers' base classes.

The option `worker_extension_cls` names the class. The API process calls the methods through `collective_rpc`.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

from tonnage.server.engines.niceness import stand_back


class WorkerExtension:
    """Methods that `worker_extension_cls` adds to each vLLM worker, so that the API process can call them."""

    model_runner: Any

    def tonnage_on_cpu(self) -> None:
        """Lower the worker's CPU priority below that of the API process, and avoid a late compilation.

        vLLM 0.32 ranks tokens for log probabilities with a function that torch.compile compiles at the first
        request for them. That compilation stalls all requests for 3 s (benchmarks/abuse.py, case `deaf`). This
        method replaces the function by its uncompiled version.
        """
        from vllm.v1.sample import sampler  # imported here, because vLLM is optional in the API process

        stand_back()
        compiled = vars(sampler)["batched_count_greater_than"]
        vars(sampler)["batched_count_greater_than"] = getattr(compiled, "_torchdynamo_orig_callable", compiled)

    def tonnage_die_with(self, api_process: int, at_once: bool) -> None:
        """End vLLM's engine core if the API process ends without a shutdown (kill -9, out of memory).

        vLLM 0.32 ends workers when their engine core ends, but the core itself would stay and keep its memory.

        Args:
            api_process: process id of the API process.
            at_once: kill core and worker at once, because freeing their heaps takes seconds. For CPUs, where
                the processes have no GPU to release.
        """
        # Find the engine core. With one GPU, the worker runs in the core's process, a child of the API process.
        # Otherwise the worker is a child of the core.
        core = os.getpid() if os.getppid() == api_process else os.getppid()
        handle = os.pidfd_open(api_process)

        def watch() -> None:
            select.select([handle], [], [])  # a pidfd becomes readable when its process has ended
            os.kill(core, signal.SIGKILL if at_once else signal.SIGTERM)
            if at_once:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="tonnage-watch", daemon=True).start()

    def tonnage_import_masks(self) -> None:
        """Import xgrammar, which applies grammar masks to logits, before the first request.

        vLLM 0.32 would import it during the first step with a mask.
        """
        import xgrammar  # noqa: F401 -- a dependency of vLLM

    def tonnage_memory(self) -> tuple[int | None, int]:
        """Return the worker's memory in bytes, (weights and buffers, KV pool); each storage counts once.

        The first value is None if linear layers keep their weights only in a packed form outside of torch. vLLM
        0.32 does so on a CPU with 16-bit weights (dispatch_cpu_unquantized_gemm in
        model_executor/layers/utils.py, `remove_weight`). oneDNN does not report the size of its packed copy.
        The output head keeps both its weight and a packed copy, and the packed copy counts as framework memory.
        """
        model = self.model_runner.model
        packed = any(hasattr(module, "cpu_linear") and not module.weight.numel() for module in model.modules())
        weights = None if packed else _storages([*model.parameters(), *model.buffers()])
        return weights, _storages(self.model_runner.kv_caches)

    def tonnage_lora_memory(self) -> int:
        """Return the bytes of memory of all layers' LoRA adapter slots (lora/layers/base_linear.py, 0.32)."""
        slots: list[Any] = []
        for module in self.model_runner.model.modules():
            for name in ("lora_a_stacked", "lora_b_stacked"):
                slots += getattr(module, name, ())
        return _storages(slots)


def _storages(tensors: list[Any]) -> int:
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
