"""Tests of torch.distributed.fsdp on gloo ranks: the fullest rank's bytes equal the plan exactly.

The ranks' bytes are stored in tests/data/oracles; `make test-oracles` starts the ranks again.
"""

from __future__ import annotations

import os
import socket

import pytest
import training_models as models
from oracle import Oracle

from tonnage.planner.training.setup import TrainingSetup

ORACLE = Oracle("training_fsdp", "torch", "transformers")
pytestmark = pytest.mark.oracle


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def layers_of(model):
    inner = getattr(model, "model", None) or getattr(model, "gpt_neox", None) or model.transformer
    return getattr(inner, "layers", None) or inner.h


def shard_sizes(family: str, version: int, group: int, world: int) -> tuple[int, int, int]:
    """Return this rank's bytes of (weights, gradients, states) after two AdamW steps under FSDP.

    Each layer is a unit. ``group`` is the number of ranks in a shard group, below ``world`` for hybrid
    sharding.
    """
    import torch

    model = models.real_model(family)
    if version == 2:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = (world // group, group), ("replicate", "shard")
        if group == world:
            shape, names = (world,), ("shard",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({type(layers_of(model)[0])})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 500, (1, 16))
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def size(tensors) -> int:
        # FSDP2 pads shards to equal rows and shows a view without the padding
        local = [getattr(t, "_local_tensor", t) for t in tensors]
        return sum(t.numel() * t.element_size() for t in local)

    parameters = list(model.parameters())
    states = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return size(parameters), size(p.grad for p in parameters), size(states)


def worker(rank: int, world: int, port: int, cases: tuple, queue) -> None:
    """Run all cases of one world size in the same processes, because starting them is slow."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        queue.put((rank, [shard_sizes(*case, world) for case in cases]))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # All results are sent. torch 2.13 sometimes aborts when an interpreter ends beside a thread of gloo's.
    os._exit(0)


def run(world: int, cases: tuple) -> list[list[tuple[int, ...]]]:
    """Return each rank's sizes of each case."""
    import torch

    context = torch.multiprocessing.get_context("spawn")
    queue, port = context.SimpleQueue(), free_port()
    processes = [
        context.Process(target=worker, args=(rank, world, port, cases, queue)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    assert codes == [0] * world
    found = dict(queue.get() for _ in range(world))
    return [found[rank] for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, (("llama", 2, 2), ("gpt_neox", 1, 2))),
        (3, (("gpt_neox", 2, 3), ("gemma2", 2, 3), ("falcon", 1, 3))),
        (4, (("qwen3", 2, 4), ("llama", 2, 2))),
    ],
)
def test_planned_fsdp_shard_bytes_equal_torch(world, cases):
    """FSDP2 gives the remaining rows to the first rank; FSDP1 pads each unit to equal shards.

    Hybrid sharding (the last case) divides by the group and replicates across groups.
    """
    inputs = [world, *((*case, models.config_of(case[0])) for case in cases)]
    found = ORACLE.says(f"{world} ranks", inputs, lambda: run(world, cases))
    for index, (family, version, group) in enumerate(cases):
        hybrid = {"strategy": "fsdp"} if group == world else {"strategy": "fsdp-hybrid", "shard_size": group}
        setup = TrainingSetup(precision="fp32", gpus=world, fsdp_version=version, **hybrid)
        model = models.planner(family)
        states = model.states(setup, 0)
        ranks = [tuple(rank[index]) for rank in found]
        assert (states.weights, states.gradients, states.optimizer) == ranks[0], (family, version)
        assert all(sizes <= ranks[0] for sizes in ranks)
        whole = world // group * 4 * model.trained(setup).parameters
        assert whole <= sum(sizes[0] for sizes in ranks) < whole + 4 * world * 64


def test_ddp_replicates_all_states():
    setup = TrainingSetup(precision="fp32", gpus=4)
    one = models.planner("llama").states(TrainingSetup(precision="fp32"), 0)
    assert models.planner("llama").states(setup, 0) == one
