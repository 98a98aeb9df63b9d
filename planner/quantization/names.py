"""Values of --quantization by the names of vLLM and SGLang.

For a quantized checkpoint, a name stands for the tool that wrote it. For 16-bit weights, it stands for the
format into which the engine converts them. Sources: QuantizationMethods in
model_executor/layers/quantization/__init__.py of vLLM 0.8.5 to 0.33.0, and BASE_QUANTIZATION_METHODS in
srt/layers/quantization/__init__.py of SGLang 0.5.23.
"""

from __future__ import annotations

# Value of --quantization -> values of the checkpoint's quant_method with which an engine accepts it.
CHECKPOINTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gptq", "gptq_marlin", "auto_gptq", "gptq_bitblas"), ("gptq",)),
    **dict.fromkeys(("awq", "awq_marlin", "auto_awq"), ("awq",)),
    "moe_wna16": ("gptq", "awq"),
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
    **dict.fromkeys(
        ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed"), ("modelopt",)
    ),
    "fbgemm_fp8": ("fbgemm_fp8",),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), ("mxfp4",)),
    "torchao": ("torchao",),
    "hqq": ("hqq",),
}
# Value of --quantization -> format to which the engine converts 16-bit weights on load, named as in formats/.
# bitsandbytes makes NF4 with plain (not nested) scales (quant_type in model_loader/bitsandbytes_loader.py, vLLM
# 0.27).
WHILE_LOADING = {
    "bitsandbytes": "nf4",
    "fp8_per_tensor": "fp8",
    "fp8_per_channel": "fp8-channel",
    "ptpc_fp8": "fp8-channel",
    "fp8_per_block": "fp8-block",
}
# Value of --quantization with which the engine needs a quantized checkpoint -> the weight format that a plan
# assumes for such a checkpoint, if the files given to the planner have 16-bit weights.
_SUPPOSED = {
    **dict.fromkeys(("gptq_marlin", "auto_gptq", "gptq_bitblas"), "gptq"),
    **dict.fromkeys(("awq_marlin", "auto_awq"), "awq"),
    "modelopt_fp4": "nvfp4",
    "modelopt_fp8": "fp8",
    "modelopt_mxfp8": "mxfp8",
}
# Name that only some vLLM releases from 0.8 to 0.33 accept -> (first, last) minor release with the name. None
# means that the name exists from before 0.8, or until after 0.33.
VLLM_RELEASES: dict[str, tuple[tuple[int, int] | None, tuple[int, int] | None]] = {
    "auto_awq": ((0, 24), None),
    "auto_gptq": ((0, 22), None),
    "bitsandbytes": (None, (0, 27)),
    "fp8_per_block": ((0, 20), None),
    "fp8_per_channel": ((0, 24), None),
    "fp8_per_tensor": ((0, 20), None),
    "gpt_oss_mxfp4": ((0, 20), None),
    "gptq_bitblas": (None, (0, 15)),
    "modelopt_fp4": ((0, 9), None),
    "modelopt_mixed": ((0, 17), None),
    "modelopt_mxfp8": ((0, 16), None),
    "ptpc_fp8": (None, (0, 18)),
}


def supposed(name: str) -> str:
    """Return the weight format that a plan assumes for 16-bit weights under --quantization `name`."""
    return WHILE_LOADING.get(name) or _SUPPOSED.get(name, name)


def names_checkpoint(name: str, method: str | None, scheme: str) -> bool:
    """Return whether an engine accepts --quantization `name` for a checkpoint of this quant_method and scheme.

    The name `fp4` is accepted for every NVFP4 checkpoint, whatever tool wrote it.
    """
    return method in CHECKPOINTS.get(name, ()) or (name == "fp4" and "nvfp4" in scheme)
