"""Print the bytes of vLLM's encoder classes in a dtype on the meta device; one JSON line per folder.

The bytes are counted before a CPU packs them. There are no weights and no engine.
"""

import json
import sys
import tempfile

import torch


def main(dtype: str, folders: list[str]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    ready = False
    for folder in folders:
        arguments = EngineArgs(
            model=folder, runner="pooling", dtype=dtype, skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=64,
        )  # fmt: skip
        config: VllmConfig = arguments.create_engine_config()
        with set_current_vllm_config(config):
            if not ready:
                store = tempfile.mktemp()
                init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
                initialize_model_parallel(1, 1)
                ready = True
            with set_default_torch_dtype(getattr(torch, dtype)), torch.device("meta"):
                model = initialize_model(vllm_config=config)
        held = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
        names = {n: tuple(t.shape) for n, t in model.named_buffers()}
        answer = {"folder": folder, "bytes": sum(held.values()), "buffers": names}
        print("RESULT " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
