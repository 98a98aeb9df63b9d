"""Print vLLM's MultiModalBudget and the largest item's shapes per folder, under its flags.json.

One JSON line per folder. There are no weights and no engine. It needs torchvision.
"""

import json
import sys
from pathlib import Path

LONGEST = 8192  # a video for more tokens takes minutes to make


def main(folders: list[str]) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    for folder in folders:
        flags = json.loads((Path(folder) / "flags.json").read_text())
        config = EngineArgs(
            model=folder, dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=1 << 30, **flags
        ).create_engine_config()
        budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
        answer = {
            "folder": folder,
            "tokens": dict(budget.mm_max_toks_per_item),
            "budget": budget.get_encoder_budget(),
            "step": config.scheduler_config.max_num_batched_tokens,
            "seqs": config.scheduler_config.max_num_seqs,
        }
        if budget.mm_max_toks_per_item:
            modality = budget.get_modality_with_max_tokens()
            answer |= {"modality": modality, "count": budget.mm_max_items_per_batch[modality], "shapes": {}}
            if flags["max_model_len"] <= LONGEST:
                (_, item), *_ = budget.get_dummy_encoder_profile_inputs(modality)
                answer["shapes"] = {
                    name: list(part.data.shape) for name, part in item.items() if hasattr(part.data, "shape")
                }
        print("RESULT " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
