"""A class that vLLM mixes into its workers (`worker_extension_cls`), in their processes.

The API process calls its methods through `collective_rpc`.
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
        """Lower the worker's priority below the API process, and compute log probabilities without a compiler.

        vLLM 0.32 ranks a token with a function that torch.compile compiles in the first request with log
        probabilities. All requests stall for 3 s meanwhile (benchmarks/abuse.py, deaf).
        """
        from vllm.v1.sample import sampler  # vLLM is optional in the API process

        stand_back()
        compiled = vars(sampler)["batched_count_greater_than"]
        vars(sampler)["batched_count_greater_than"] = getattr(compiled, "_torchdynamo_orig_callable", compiled)

    def tonnage_die_with(self, api_process: int, at_once: bool) -> None:
        """End vLLM's engine core when process `api_process` ends without a shutdown (kill -9, out of memory).

        vLLM 0.32 ends workers with their engine core, but keeps the core and its memory.

        Args:
            api_process: process id.
            at_once: kill core and worker, where no device has to be released in order; freeing their heaps
                would take seconds.
        """
        # With one GPU the worker runs in the engine core, a child of the API process. Otherwise the worker is
        # the core's child.
        core = os.getpid() if os.getppid() == api_process else os.getppid()
        handle = os.pidfd_open(api_process)

        def watch() -> None:
            select.select([handle], [], [])  # readable when the process has ended
            os.kill(core, signal.SIGKILL if at_once else signal.SIGTERM)
            if at_once:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="tonnage-watch", daemon=True).start()

    def tonnage_import_masks(self) -> None:
        """Import xgrammar, which applies grammar masks to logits.

        vLLM 0.32 would import it during the first step with a mask.
        """
        import xgrammar  # noqa: F401 -- vLLM's

    def tonnage_memory(self) -> tuple[int | None, int]:
        """Return the bytes of (weights and buffers, KV pool), each storage counted once.

        The first is None when linear layers keep their weights only in a packed form outside of torch. vLLM
        0.32 does so on a CPU with 16-bit weights (dispatch_cpu_unquantized_gemm in
        model_executor/layers/utils.py, `remove_weight`), and oneDNN does not report the size of its copy. The
        output head keeps its weight beside the copy, which then counts as framework.
        """
        model = self.model_runner.model
        packed = any(hasattr(module, "cpu_linear") and not module.weight.numel() for module in model.modules())
        weights = None if packed else _storages([*model.parameters(), *model.buffers()])
        return weights, _storages(self.model_runner.kv_caches)

    def tonnage_lora_memory(self) -> int:
        """Return the bytes of the LoRA slots of all layers (lora/layers/base_linear.py, 0.32)."""
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
