"""Print the memory of a model with a draft under vLLM; one JSON line per folder.

Run as a program. It builds vLLM's own draft modules on the meta device, and calls its KV-config functions with
the layers of both models.
"""

import json
import os
import sys
from pathlib import Path

import vllm_capacity_child as capacity


def main(folders: list[str]) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = lambda look: look()
    torch.cuda.Event = object
    ready = False
    for folder in folders:
        try:
            asked = json.loads((Path(folder) / "asked.json").read_text())
            config = EngineArgs(
                f"{folder}/model", dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
                load_format="dummy", **asked,
            ).create_engine_config()  # fmt: skip
            with set_current_vllm_config(config):
                if not ready:
                    store = f"tcp://127.0.0.1:{capacity.free_port()}"
                    init_distributed_environment(1, 0, store, 0, "gloo")
                    ensure_model_parallel_initialized(1, 1)
                    ready = True
                capacity.make_expert_group()
                torch.set_default_dtype(torch.bfloat16)
                with torch.device("meta"):
                    initialize_model(vllm_config=config)
            speculative = config.speculative_config
            inner = speculative.apply_draft_overrides(config)
            with set_current_vllm_config(inner), torch.device("meta"):
                draft = initialize_model(vllm_config=inner, model_config=speculative.draft_model_config)
            with set_current_vllm_config(config):
                current_platform.update_block_size_for_backend(config)
                out = capacity.measure(config, capacity.kv_cache_config(config))
            out |= held(draft)
        except Exception as error:  # printed for the test, which fails on it
            out = {"error": f"{type(error).__name__}: {error}"[:600]}
        print("RESULT " + json.dumps({"folder": folder, **out}), flush=True)


def held(draft) -> dict:
    """Return the bytes of the draft's parameters, with embedding and heads listed separately.

    Shared embeddings and heads are the model's own (v1/worker/gpu/spec_decode/eagle/utils.py).
    """
    sizes = {"embedding": 0, "heads": 0, "rest": 0}
    for name, parameter in draft.named_parameters():
        kind = "rest"
        if "embed_tokens" in name:
            kind = "embedding"
        elif "lm_head" in name or name.endswith("shared_head.head.weight"):
            kind = "heads"
        sizes[kind] += parameter.numel() * parameter.element_size()
    return {"bytes": sizes, "own_heads": bool(getattr(draft, "has_own_lm_head", False))}


if __name__ == "__main__":
    main(sys.argv[1:])
