"""Print the host memory of vLLM's own objects; one JSON line per case.

Run as a program. ``queues`` are the real message queues of an executor and its workers. ``states`` are the
pinned buffers of the second model runner, counted at their allocation. ``tier`` is the CPU tier of
--kv-offloading-size.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace


def main(folders: list[str]) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for folder in folders:
        asked = json.loads((Path(folder) / "asked.json").read_text())
        try:
            out = {"queues": queues, "states": states, "tier": tier}[asked.pop("what")](**asked)
        except Exception as error:  # printed for the test, which fails on it
            out = {"error": f"{type(error).__name__}: {error}"[:400]}
        print("RESULT " + json.dumps({"folder": folder, **out}), flush=True)


def queues(tensor: int, pipeline: int) -> dict:
    """Return the bytes of all rings, as MultiprocExecutor, WorkerProc and GroupCoordinator create them."""
    from vllm import envs
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    shm_broadcast.check_shm_free_space = lambda *_, **__: None
    ranks, total = tensor * pipeline, 0
    made = [MessageQueue(ranks, ranks, max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB << 20)]
    total += made[0].buffer.total_bytes_of_buffer
    answer = MessageQueue(1, 1)
    total += ranks * answer.buffer.total_bytes_of_buffer
    if tensor > 1:
        # MessageQueue.create_from_process_group(cpu_group, 1 << 22, 6): all others of the group read
        group = MessageQueue(tensor - 1, tensor - 1, max_chunk_bytes=1 << 22, max_chunks=6)
        total += pipeline * group.buffer.total_bytes_of_buffer
    return {"bytes": total}


def states(seqs: int, length: int, axes: int) -> dict:
    """Return the bytes that RequestState and, with ``axes``, RopeState pin."""
    import torch
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.mm.rope import RopeState
    from vllm.v1.worker.gpu.states import RequestState

    pinned = []

    class Buffer:
        def __init__(self, size, dtype) -> None:
            rows = (size,) if isinstance(size, int) else tuple(size)
            pinned.append(torch.Size(rows).numel() * dtype.itemsize)
            self.cpu = torch.zeros((rows[0], *[0 for _ in rows[1:]]), dtype=dtype)
            self.np = self.cpu.numpy()

        def uva(self, n=None):
            return self.cpu

    buffer_utils.UvaBuffer = Buffer
    buffer_utils.is_uva_available = lambda: True
    device = torch.device("cpu")
    RequestState(seqs, length, 2048, 0, 1000, device)
    if axes:
        RopeState(num_dims=axes, max_num_reqs=seqs, max_num_tokens=2048, max_model_len=length, device=device)
    return {"bytes": sum(pinned)}


def tier(block: int, ranks: int, replicated: bool, gib: float) -> dict:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    def init(self, config) -> None:
        self.config, self.extra_config, self.blocks_per_chunk = config, config.extra_config, 1

    OffloadingSpec.__init__ = init
    CPUOffloadingSpec._uses_shared_region = lambda self: True
    spec = CPUOffloadingSpec(
        SimpleNamespace(
            extra_config={"cpu_bytes_to_use": gib * (1 << 30)}, replicated_layout=replicated,
            worker_kv_bytes_per_block=block, parallel=SimpleNamespace(world_size=ranks),
        )
    )  # fmt: skip
    return {"chunk": spec.kv_bytes_per_chunk, "chunks": spec.num_chunks}


if __name__ == "__main__":
    main(sys.argv[1:])
