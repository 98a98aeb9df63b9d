"""Runs inside vLLM's worker processes. vLLM mixes the class into its worker (``worker_extension_cls``) and
the API process calls its methods through ``collective_rpc``."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

from tonnage.server.engines.niceness import stand_back


class WorkerExtension:
    """These methods become methods of the worker."""

    model_runner: Any

    def tonnage_on_cpu(self) -> None:
        """What computes gives way to the API process, and log probabilities need no compiler.

        vLLM 0.32 counts what is likelier than a token by a function for which the first request that wants log
        probabilities waits for torch.compile: nobody got a token for 3 s (benchmarks/abuse.py, deaf).
        """
        from vllm.v1.sample import sampler  # vLLM's, which the API process need not have

        stand_back()
        compiled = vars(sampler)["batched_count_greater_than"]
        vars(sampler)["batched_count_greater_than"] = getattr(compiled, "_torchdynamo_orig_callable", compiled)

    def tonnage_die_with(self, api_process: int, at_once: bool) -> None:
        """End vLLM's engine core when ``api_process`` ends without saying so (kill -9, out of memory).

        vLLM 0.32 ends workers with their engine core, but leaves the core and its memory behind. ``at_once``:
        there is no device to leave in order. Both are killed; they would take their heaps apart for seconds.
        """
        # The worker is a child of the core, or (one GPU) lives in the core, which is a child of the API.
        core = os.getpid() if os.getppid() == api_process else os.getppid()
        handle = os.pidfd_open(api_process)

        def watch() -> None:
            select.select([handle], [], [])  # readable when the process has ended
            os.kill(core, signal.SIGKILL if at_once else signal.SIGTERM)
            if at_once:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="tonnage-watch", daemon=True).start()

    def tonnage_import_masks(self) -> None:
        """What lays the masks of grammars over logits; vLLM 0.32 imports it in the step of the first."""
        import xgrammar  # noqa: F401 -- vLLM's

    def tonnage_memory(self) -> tuple[int | None, int]:
        """Bytes of (weights and buffers, KV pool), each storage counted once.

        The first is None where linear layers keep their weights in a packed form outside of torch only, as vLLM
        0.32 does on a CPU with 16-bit ones (dispatch_cpu_unquantized_gemm in model_executor/layers/utils.py,
        ``remove_weight``): oneDNN does not say how large its copy is. The output head keeps its weight beside
        the copy, which then counts as framework.
        """
        model = self.model_runner.model
        packed = any(hasattr(module, "cpu_linear") and not module.weight.numel() for module in model.modules())
        weights = None if packed else _storages([*model.parameters(), *model.buffers()])
        return weights, _storages(self.model_runner.kv_caches)

    def tonnage_lora_memory(self) -> int:
        """Bytes of the LoRA slots: those of each layer (lora/layers/base_linear.py, 0.32)."""
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
