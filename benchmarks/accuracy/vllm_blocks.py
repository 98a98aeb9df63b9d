"""``vllm_blocks``: num_blocks, tokens and concurrency against vLLM 0.32.0's own KV-config functions (CPU)."""

from __future__ import annotations

from accuracy.common import Inputs, Section, read_tsv

NAME = "vllm_blocks"


def score(inputs: Inputs) -> Section | None:
    if inputs.configs is None or inputs.vllm is None:
        return None
    from tonnage.planner.errors import TonnageError
    from tonnage.planner.planning.build import plan_source
    from tonnage.planner.plans import Deployment
    from tonnage.planner.source.resolve import ModelSource

    section = Section()
    flags = Deployment(
        engine="vllm", engine_version="0.32.0", gpu="cpu", device_memory=1 << 50,
        kv_cache_memory_bytes=8 << 30, max_model_len=2048, dtype="bfloat16",
    )  # fmt: skip
    for row in read_tsv(inputs.vllm, "config", "num_blocks", "tokens", "max_concurrency"):
        name = row["config"]
        config = inputs.config(name)
        if config is None:
            continue
        # the truth was made with weight quantization dropped
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        try:
            cache = plan_source(ModelSource(name, name, config, "folder"), flags).kv_cache
        except TonnageError as error:
            section.refuse(name, error)
            continue
        ours = (cache.num_blocks, cache.tokens, cache.max_concurrency)
        truth = (int(row["num_blocks"]), int(row["tokens"]), float(row["max_concurrency"]))
        section.rows += 1
        section.errors.append(max(abs(a - b) / b for a, b in zip(ours, truth, strict=True)))
        if ours == truth:
            section.exact += 1
        else:
            section.misses.append(f"{name}: planned {ours} truth {truth}")
    return section
