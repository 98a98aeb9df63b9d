"""Print the KV capacity that vLLM's own functions give a folder's model; one JSON line per folder.

Run as a program. The order is the engine's own (v1/engine/core.py): config, process groups, the model on the
meta device, block size, cache specs, layout, KV cache config, capacity. Nothing is loaded.
"""

import json
import os
import sys
from pathlib import Path


def main(folders: list[str]) -> None:
    for folder, config, found in configs(folders):
        out = (
            {"error": found}
            if isinstance(found, str)
            else {**measure(config, found), "tier": tier(config, found)}
        )
        print("RESULT " + json.dumps({"folder": folder, **out}), flush=True)


def configs(folders: list[str], measured=None, prepare=None):
    """Yield (folder, VllmConfig, result of ``measured`` or the error) of each folder.

    ``measured`` is called with the built model, by default for the scheduler's KVCacheConfig. ``prepare`` is
    called with torch after vLLM is imported.
    """
    measured = measured or kv_cache_config
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # vLLM starts a process per architecture to look at its class; here this one does
    registry._run_in_subprocess = lambda look: look()
    torch.cuda.Event = object  # as vLLM's CPU worker does before it builds a model (v1/worker/cpu/shm.py)
    if prepare is not None:
        prepare(torch)
    ready = False
    for folder in folders:
        config = None
        try:
            arguments = json.loads((Path(folder) / "arguments.json").read_text())
            config = EngineArgs(
                folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, load_format="dummy",
                **arguments,
            ).create_engine_config()  # fmt: skip
            with set_current_vllm_config(config):
                if not ready:
                    store = f"tcp://127.0.0.1:{free_port()}"
                    init_distributed_environment(1, 0, store, 0, "gloo")
                    ensure_model_parallel_initialized(1, 1)
                    ready = True
                make_expert_group()
                torch.set_default_dtype(torch.bfloat16)
                with torch.device("meta"):
                    initialize_model(vllm_config=config)
                current_platform.update_block_size_for_backend(config)
                found = measured(config)
        except Exception as error:  # printed for the test, which fails on it
            found = f"{type(error).__name__}: {error}"[:400]
        yield folder, config, found


def make_expert_group() -> None:
    """Create the expert-parallel group, which MoE layers need and only a MoE model creates itself."""
    from vllm.distributed import parallel_state as state

    if state._EP is None:
        state._EP = state.init_model_parallel_group([[0]], 0, "gloo", group_name="ep")


def kv_cache_config(config):
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    layers = config.compilation_config.static_forward_context
    specs, backends = {}, []
    for name, layer in layers.items():
        if not isinstance(layer, AttentionLayerBase):
            continue
        spec = layer.get_kv_cache_spec(config)
        if spec is not None and getattr(layer, "kv_sharing_target_layer_name", None) is None:
            specs[name] = spec
            backends.append(layer.get_attn_backend())
    register_all_kvcache_specs(config)
    names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    resolve_kv_cache_layout(config, [names], specs.values())
    (found,) = get_kv_cache_configs(config, [specs], [config.cache_config.kv_cache_memory_bytes])
    return generate_scheduler_kv_cache_config([found])


def measure(config, found) -> dict:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    tokens, concurrency = get_kv_cache_capacity(config, found)
    kinds = [[type(g.kv_cache_spec).__name__, len(g.layer_names)] for g in found.kv_cache_groups]
    budget = config.scheduler_config.max_num_batched_tokens
    return {
        "budget": budget,
        "num_blocks": found.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "groups": kinds,
    }


def tier(config, found) -> dict:
    """Return the bytes of a chunk that vLLM offloads, the chunks in 1 GiB, and those of a request by group.

    A group is [tokens of a chunk, most chunks], of which the second is None for full attention.
    """
    from types import SimpleNamespace

    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        get_sliding_window_size_in_chunks,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", engine_id="tests",
        kv_connector_extra_config={"cpu_bytes_to_use": 1 << 30},
    )  # fmt: skip
    try:
        asked = build_offloading_config(config, found)
    except AssertionError as error:  # vLLM ends with it
        return {"error": str(error)[:200]}

    def init(self, given) -> None:
        self.config, self.extra_config = given, given.extra_config
        self.blocks_per_chunk = given.cache.blocks_per_chunk

    OffloadingSpec.__init__ = init
    CPUOffloadingSpec._uses_shared_region = lambda self: True
    spec = CPUOffloadingSpec(SimpleNamespace(
        extra_config=asked.extra_config, replicated_layout=asked.replicated_layout, cache=asked.cache,
        worker_kv_bytes_per_block=asked.worker_kv_bytes_per_block, parallel=asked.parallel,
    ))  # fmt: skip
    groups = [
        [
            group.tokens_per_block * asked.cache.blocks_per_chunk,
            get_sliding_window_size_in_chunks(
                found.kv_cache_groups[group.group_id].kv_cache_spec,
                group.tokens_per_block * asked.cache.blocks_per_chunk,
            ),
        ]
        for group in asked.groups
    ]
    return {"chunk_bytes": spec.kv_bytes_per_chunk, "chunks": spec.num_chunks, "groups": groups}


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    main(sys.argv[1:])
