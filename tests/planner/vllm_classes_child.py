"""Print the parameters and KV cache of vLLM's model classes on the meta device; one JSON line per config.

Standard input is a JSON list of configs. A model type that transformers does not know gets a config class
without defaults, as remote code would give it. There are no weights and no engine.
"""

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_CONFIGS = {"new": "NewConfig"}  # names of config classes that vLLM checks
_VALUES = ("step1",)  # model types whose constructor reads values of a tensor


def _register(config: dict[str, Any]) -> None:
    """Register a plain config class for a model type that neither transformers nor vLLM knows."""
    from transformers import AutoConfig, PretrainedConfig, XLMRobertaConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    name = config.get("model_type")
    if name is None:
        return
    if config.get("position_embedding_type") == "rotary":  # vLLM checks the name of Jina's own config class
        XLMRobertaConfig.__name__ = "XLMRobertaFlashConfig"
    try:
        AutoConfig.for_model(name)
    except ValueError:
        if name not in _CONFIG_REGISTRY:
            AutoConfig.register(
                name, type(_CONFIGS.get(name, "Plain"), (PretrainedConfig,), {"model_type": name})
            )
    except Exception:  # the type is known, but its config class needs arguments
        return


def _cache(config: Any) -> list[list[Any]]:
    """Return [kind, KV heads, head size, window] of each layer that has a cache."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    out = []
    for layer in get_layers_from_vllm_config(config, AttentionLayerBase).values():
        spec = layer.get_kv_cache_spec(config)
        if spec is None:
            continue
        kind = type(spec).__name__
        sizes = [getattr(spec, name, None) for name in ("num_kv_heads", "head_size", "sliding_window")]
        out.append([kind, *sizes])
    return out


def answer(config: dict[str, Any], ready: bool) -> dict[str, Any]:
    """Return the answer to one config: numbers of parameters by dtype, and the cache."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    runner = config.pop("_runner", "auto")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        _register(config)
        made = EngineArgs(
            model=folder, dtype="bfloat16", runner=runner, skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=64,
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(made), ExitStack() as stack:
            if not ready:
                store = tempfile.mktemp()
                init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            destroy_model_parallel()  # only models with experts have a group for them
            initialize_model_parallel(1, 1)
            if config["architectures"] == ["LongcatFlashNgramForCausalLM"]:
                # Its class refuses the runner of a CPU, which has the same tensors and caches.
                stack.enter_context(patch.object(type(made), "use_v2_model_runner", True))
            device = "cpu" if config.get("model_type") in _VALUES else "meta"
            with set_default_torch_dtype(torch.bfloat16), torch.device(device):
                model = initialize_model(vllm_config=made)
        own = {id(p): p for p in model.parameters()}.values()
        sizes: dict[str, int] = {}
        for p in own:
            sizes[str(p.dtype)] = sizes.get(str(p.dtype), 0) + p.numel()
        found = {"parameters": sizes, "cache": _cache(made)}
        if "--names" in sys.argv:
            found["names"] = {n: list(p.shape) for n, p in model.named_parameters()}
        return found


def main() -> None:
    """Answer all configs of standard input."""
    from vllm.model_executor.models import rnj1, step1

    # A CPU's attention lacks the square roots of ALiBi and chunks, which have no tensors.
    made = step1.Attention
    step1.Attention = lambda *args, use_alibi_sqrt, **rest: made(*args, **rest)
    rnj1.Attention = lambda *args, chunk_lookback, **rest: made(*args, **rest)
    ready = False
    for config in json.load(sys.stdin):
        try:
            found = answer(config, ready)
            ready = True
        except Exception as error:
            if "--names" not in sys.argv:
                raise
            import traceback

            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
