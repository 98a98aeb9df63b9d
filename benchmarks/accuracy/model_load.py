"""Section ``model_load``: bytes that vLLM prints after loading, per GPU, from config and flags.

The log line is "Model loading took".
"""

from __future__ import annotations

from typing import Any

from accuracy.common import Inputs, Section, read_jsonl
from accuracy.reports import GIB, label, model_config, quantization_known
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm.repack import mxfp4_padding
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource

NAME = "model_load"


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the section, or None without configs and reports."""
    if inputs.configs is None or inputs.reports is None:
        return None
    section = Section()
    left_out: list[str] = []
    within = 0
    for index, row in enumerate(read_jsonl(inputs.reports)):
        printed = row["observed"].get("model_load_gib")
        if printed is None or not row["engine"].startswith("vLLM"):
            continue
        name = label(index, row)
        why = _unusable(row)
        config = model_config(inputs, row)
        if why or config is None:
            left_out.append(f"{name}: {why or 'no config'}")
            continue
        within += _row(section, name, row, config, printed)
    section.extra |= {"within_1_percent": within, "left_out": left_out}
    return section


def _unusable(row: dict[str, Any]) -> str | None:
    if not quantization_known(row):
        return "the weights' format is only in the model's name"
    if "Unsloth" in row["engine"] and row["quantization"]:
        return "Unsloth's own 4-bit checkpoints leave modules out that no config here names"
    if row["speculative"]:
        return "the draft model is loaded too"
    if "max_lora_rank" in str(row["other_flags"]):
        return "LoRA slots of a rank the report does not state"
    if "DISAGREES" in (row["consistency_note"] or ""):
        return "the report contradicts itself (its own note)"
    if (row["gpu"] or "").startswith("AMD"):
        return (
            "vLLM on ROCm printed what the device lost, the runtime's own memory included (platforms/rocm.py)"
        )
    return None


def _release(text: str | None) -> str | None:
    """Return the version if the report names a release; None means the planner's newest."""
    return text if text is not None and text[:1].isdigit() else None


def architecture_body(config: dict[str, Any]) -> str:
    """Return the class name of the model without its head."""
    return str(config["architectures"][0]).replace("ForCausalLM", "Model")


def _row(section: Section, name: str, row: dict[str, Any], config: dict[str, Any], printed: float) -> bool:

    length = row["max_model_len"]
    said = str(row["other_flags"])
    if "embed" in said or "pooling" in said:
        # A pooling model has no head, so it is planned with the class of its body.
        config = {**config, "architectures": [architecture_body(config)]}
    flags = Deployment(
        engine="vllm",
        engine_version=_release(row["engine_version"]),
        enable_lora="'enable_lora': True" in said,  # rank and slots not named: vLLM's defaults, 16 and 1
        device="cuda",
        device_memory=1 << 50,
        kv_cache_memory_bytes=1 << 40,
        max_model_len=length,
        tensor_parallel_size=row["tensor_parallel"] or 1,
        dtype="float16" if row["gpu"] == "Tesla T4" else "auto",
    )
    try:
        plan = plan_source(ModelSource(row["model"], row["model"], config, "folder"), flags)
    except TonnageError as error:
        section.refuse(name, error)
        return False
    size = plan.rank.weights_bytes + plan.rank.lora_bytes
    if "marlin" in (row["quantization"] or "").lower() and "mxfp4" in row["quantization"]:
        # The report states a fallback to Marlin, which is not this GPU's default kernel.
        architecture = build_architecture(config)
        size += mxfp4_padding(architecture, "marlin", 1) - mxfp4_padding(architecture, "triton", 1)
    planned = size / GIB
    error_share = abs(planned - printed) / printed
    section.rows += 1
    section.errors.append(error_share)
    section.exact += round(planned, 2) == round(printed, 2)
    if error_share > 0.01:
        section.misses.append(f"{name}: planned {planned:.3f} GiB, printed {printed} GiB")
    return error_share <= 0.01
