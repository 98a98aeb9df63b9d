"""Print the results of one vLLM version's own KV-config functions, one JSON line per model folder.

    PYTHONPATH=FOLDER_OF_THE_WHEEL VLLM_TARGET_DEVICE=cpu python vllm_versions_child.py MODEL...

It supports 0.20.1 and later, and needs only the Python files of a wheel and the installed torch and
transformers. The order of the calls is the engine's own, as in tests/planner/vllm_capacity_child.py. No
weights are loaded.
"""

import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "planner"))
from vllm_capacity_child import configs


def main(folders: list[str]) -> None:
    """Print the result of each folder's model."""
    for folder, _, found in configs(folders, measure, stand_in_for_kernels):
        out = {"error": found} if isinstance(found, str) else found
        print("RESULT " + json.dumps({"folder": folder, **out}), flush=True)


def stand_in_for_kernels(torch) -> None:
    """Replace compiled operators, which models look up when they are built, by None.

    No operator is called. The emulated CPU has neither AMX nor AVX512-BF16 on every machine.
    """
    namespace = type(torch.ops._C)
    real = namespace.__getattr__

    def found(self, name):
        try:
            return real(self, name)
        except AttributeError:
            if self.name.startswith("_C"):
                return None
            raise

    namespace.__getattr__ = found
    torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = lambda: False


def measure(config) -> dict:
    """Return num_blocks, tokens, concurrency, budget and groups of [spec, layers, block size, page bytes]."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.core import kv_cache_utils as planning
    from vllm.v1.core import single_type_kv_cache_manager as managers

    specs, backends = {}, []
    for name, layer in config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase) or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(config)
        if spec is None:
            continue
        backends.append(layer.get_attn_backend())
        if hasattr(spec, "indexes_kv_by_block_stride"):  # the model runner of 0.24 to 0.28 sets it
            strided = backends[-1].indexes_kv_by_block_stride()
            spec = dataclasses.replace(spec, indexes_kv_by_block_stride=strided)
        specs[name] = spec
    if hasattr(managers, "register_all_kvcache_specs"):
        managers.register_all_kvcache_specs(config)
    set_layout(config, specs, backends)
    pool = config.cache_config.kv_cache_memory_bytes
    found = planning.generate_scheduler_kv_cache_config(planning.get_kv_cache_configs(config, [specs], [pool]))
    tokens, concurrency = capacity(planning, config, found)
    return {
        "num_blocks": found.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "budget": config.scheduler_config.max_num_batched_tokens,
        "groups": [
            [type(g.kv_cache_spec).__name__, len(g.layer_names), g.kv_cache_spec.block_size,
             g.kv_cache_spec.page_size_bytes]
            for g in found.kv_cache_groups
        ],
    }  # fmt: skip


def set_layout(config, specs, backends) -> None:
    """Set the cache layout as the engine does before it plans."""
    from vllm.v1.attention.backends import utils

    if not hasattr(utils, "resolve_kv_cache_layout"):
        return
    names = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
    utils.resolve_kv_cache_layout(config, [names], specs.values())


def capacity(planning, config, found) -> tuple[int, float]:
    """Return the tokens and the concurrency that the start-up log prints."""
    if hasattr(planning, "get_kv_cache_capacity"):
        return planning.get_kv_cache_capacity(config, found)
    said: list[tuple[str, tuple[object, ...]]] = []

    class Log:
        def info_once(self, text, *values, **_):
            said.append((text, values))

        info = info_once

    before, planning.logger = planning.logger, Log()
    try:
        planning._report_kv_cache_config(config, found)
    finally:
        planning.logger = before
    tokens = next(int(str(v[0]).replace(",", "")) for text, v in said if text.startswith("GPU KV cache size"))
    return tokens, planning.get_max_concurrency_for_kv_cache_config(config, found)


if __name__ == "__main__":
    main(sys.argv[1:])
