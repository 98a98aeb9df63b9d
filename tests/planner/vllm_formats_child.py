"""Print the KV bytes of each --kv-cache-dtype from vLLM's own spec classes; one JSON line per case.

Run as a program. The platform here is a CPU, which has none of these formats. The GPU attention backends are
therefore given by name, and block sizes are aligned as their platform aligns them. GPU libraries that the
backends import are replaced by empty modules. The called functions (customize_spec, get_kv_cache_spec, the
grouping) need none of them.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock


def main(folders: list[str]) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()
    for folder in folders:
        try:
            asked = json.loads((Path(folder) / "asked.json").read_text())
            config = EngineArgs(
                f"{folder}/engine", dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
                load_format="dummy", max_model_len=asked["max_model_len"], kv_cache_memory_bytes=asked["pool"],
                max_num_batched_tokens=2048,
            ).create_engine_config()  # fmt: skip
            out = answer(config, json.loads((Path(folder) / "config.json").read_text()), asked)
        except Exception as error:  # printed for the test, which fails on it
            out = {"error": f"{type(error).__name__}: {error}"[:400]}
        print("RESULT " + json.dumps({"folder": folder, **out}), flush=True)


def answer(config, model: dict, asked: dict) -> dict:
    from vllm.v1.core import kv_cache_utils as theirs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    config.cache_config.block_size = asked.get("block_size", 64 if "mla" in asked["backend"] else 16)
    config.cache_config.cache_dtype = asked["kv_dtype"]
    specs = latents(config, model, asked) if "mla" in asked["backend"] else heads(config, asked)
    config.cache_config.kv_cache_layout = "LBHNC"
    register_all_kvcache_specs(config)
    groups = theirs.get_kv_cache_groups(config, specs)
    found = theirs.get_kv_cache_config_from_groups(config, groups, asked["pool"])
    tokens, concurrency = theirs.get_kv_cache_capacity(config, found)
    return {
        "kv_dtype": config.cache_config.cache_dtype,
        "block_size": config.cache_config.block_size,
        "layers": [len(group.layer_names) for group in groups],
        "pages": sorted({spec.page_size_bytes for spec in specs.values()}),
        "num_blocks": found.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
    }


def heads(config, asked: dict) -> dict:
    """Return vLLM's KV cache spec of each full attention layer.

    The layers at both ends stay in the model's dtype where the format requires it.
    """
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.platforms.interface import Platform
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.worker.utils import customize_attention_spec

    model, cache, backend = config.model_config, config.cache_config, packed(asked["backend"])
    edges = TurboQuantConfig.get_boundary_skip_layers(model) if asked["edges"] else []
    cache.kv_cache_dtype_skip_layers = edges
    if edges:
        Platform._align_heterogeneous_kv_block_size.__func__(Platform, config, FlashAttentionBackend)
    specs = {}
    for layer in range(model.hf_text_config.num_hidden_layers):
        native = str(layer) in edges
        dtype = "auto" if native else cache.cache_dtype
        its = FlashAttentionBackend if native else backend
        size = model.get_head_size()
        like = SimpleNamespace(
            attn_type=AttentionType.DECODER, kv_cache_dtype=dtype, sliding_window=None, attn_backend=its,
            num_kv_heads=model.get_num_kv_heads(config.parallel_config), head_size=size, head_size_v=size,
            kv_cache_torch_dtype=kv_cache_dtype_str_to_dtype(dtype, model),
        )  # fmt: skip
        specs[f"model.layers.{layer}.attn"] = customize_attention_spec(
            its, Attention.get_kv_cache_spec(like, config)
        )
    return specs


def packed(name: str):
    if name == "triton":
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend as backend
    elif name == "turboquant":
        from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend as backend
    elif name == "flashinfer":
        for part in ("", ".decode", ".fp4_quantization", ".prefill", ".utils", ".cute_dsl", ".comm"):
            sys.modules.setdefault(f"flashinfer{part}", MagicMock())
        from vllm.v1.attention.backends.flashinfer import FlashInferBackend as backend

        for part in [part for part in sys.modules if part.partition(".")[0] == "flashinfer"]:
            del sys.modules[part]
    else:
        from dataclasses import replace

        from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
        from vllm.v1.attention.ops.ultraquant.format import slot_size

        class backend(TurboQuantAttentionBackend):
            @classmethod
            def customize_spec(cls, spec):
                return replace(spec, state_content_bytes=slot_size(spec.head_size))

    return backend


def latents(config, model: dict, asked: dict) -> dict:
    """Return the KV cache specs of sparse MLA: a row per layer, and the keys of layers with an indexer.

    The layers with an indexer follow transformers' config class. ``config`` is another model's, because these
    classes do not run on a CPU.
    """
    import torch
    from transformers import AutoConfig
    from vllm.model_executor.layers.attention.mla_attention import (
        MLAAttention,
        _canonicalize_sparse_mla_kv_cache_dtype,
    )
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    hf, cache = AutoConfig.for_model(**model), config.cache_config
    backend = SimpleNamespace(get_name=lambda: asked["backend"].upper())
    cache.cache_dtype = _canonicalize_sparse_mla_kv_cache_dtype(backend, cache.cache_dtype)
    size = hf.kv_lora_rank + hf.qk_rope_head_dim
    kinds = getattr(hf, "indexer_types", None) or ["full"] * hf.num_hidden_layers
    key = hf.index_head_dim
    specs = {}
    for layer, kind in enumerate(kinds):
        like = SimpleNamespace(
            kv_cache_dtype=cache.cache_dtype, head_size=size, sliding_window=None,
            indexer=object() if kind == "full" else None, non_causal_multi_token_decode=False,
        )  # fmt: skip
        specs[f"model.layers.{layer}.attn"] = MLAAttention.get_kv_cache_spec(like, config)
        if kind == "full":  # fp8 and one fp32 scale for 128 values, as Indexer.__init__ asks for
            beside = SimpleNamespace(cache_config=cache, head_dim=key + key // 128 * 4, dtype=torch.uint8)
            specs[f"model.layers.{layer}.indexer"] = DeepseekV32IndexerCache.get_kv_cache_spec(beside, config)
    return specs


if __name__ == "__main__":
    main(sys.argv[1:])
