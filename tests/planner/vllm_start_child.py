"""Start vLLM on each folder's model with dummy weights and print its pool; one JSON line per folder.

The engine core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0): five starts in one interpreter.
"""

import gc
import json
import os
import sys
from pathlib import Path


def main(folders: list[str]) -> None:
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    for folder in folders:
        arguments = json.loads((Path(folder) / "arguments.json").read_text())
        try:
            llm = LLM(
                folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, load_format="dummy",
                disable_log_stats=True, **arguments,
            )  # fmt: skip
            sampling = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
            (answer,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
            config = llm.llm_engine.vllm_config
            out = {
                "num_blocks": config.cache_config.num_gpu_blocks,
                "tokens": config.cache_config.kv_cache_size_tokens,
                "concurrency": config.cache_config.kv_cache_max_concurrency,
                "budget": config.scheduler_config.max_num_batched_tokens,
                "answered": len(answer.outputs[0].token_ids),
            }
            del llm
        except Exception as error:  # printed for the test, which fails on it
            out = {"error": f"{type(error).__name__}: {error}"[:400]}
        print("RESULT " + json.dumps({"folder": folder, **out}), flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
