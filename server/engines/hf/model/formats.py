"""Checkpoint formats: the arguments for transformers' loader, and formats that the HF engine rejects.

A format is rejected before the load. The error names the format and the package to install. This module does
not import torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tonnage.planner.errors import CheckpointError, DeploymentError, UnsupportedArchitecture
from tonnage.planner.plans import Plan

# For each quantization scheme of the plan, the required module and how to install it. GPTQModel needs newer
# torch and transformers than vLLM (7.7.0: torch >= 2.14.1, transformers >= 5.20.2), and therefore an
# environment of its own.
NEEDS = {
    "int8": ("bitsandbytes", "pip install 'tonnage[bnb]'"),
    "nf4": ("bitsandbytes", "pip install 'tonnage[bnb]'"),
    "nf4-double": ("bitsandbytes", "pip install 'tonnage[bnb]'"),
    "fp4": ("bitsandbytes", "pip install 'tonnage[bnb]'"),
    "fp4-double": ("bitsandbytes", "pip install 'tonnage[bnb]'"),
    "gptq": ("gptqmodel", "pip install 'tonnage[gptq]' in an environment without vLLM"),
    "awq": ("gptqmodel", "pip install 'tonnage[gptq]' in an environment without vLLM"),
}
MADE_BY_FLAG = ("int8", "nf4", "nf4-double", "fp4", "fp4-double")

# For each quantization_config.quant_method, the reason why the HF engine does not load it on a CPU
# (transformers 5.19, quantizers/). transformers would unpack the weights to two to four times the planned
# bytes.
_NOT_ON_CPU = {
    "fp8": "transformers has FP8 kernels for GPUs only and would unpack every matrix",
    "fbgemm_fp8": "transformers refuses FBGEMM's FP8 without a GPU",
    "compressed-tensors": "transformers unpacks every matrix in the first forward on a CPU",
    "mxfp4": "transformers runs MXFP4 with Triton kernels from the hub, else it unpacks every expert",
    "modelopt": "transformers does not read ModelOpt checkpoints",
    "hqq": "the hqq package is not reviewed yet",
    "torchao": "the torchao package is not reviewed yet",
}


def require_loadable(plan: Plan, config: Mapping[str, Any]) -> None:
    """Raise an error if this engine cannot load the model's checkpoint format on this device.

    Args:
        plan: the memory plan.
        config: content of config.json.

    Raises:
        UnsupportedArchitecture: the format does not run on this device.
        DeploymentError: a package is missing, or the weights cannot be quantized during the load.
        CheckpointError: the weights are not safetensors.
    """
    require_weights(plan.model.path)
    if plan.model.path.endswith(".gguf"):
        require_gguf(plan.model.path)
    quantization = plan.deployment.quantization
    stored = (config.get("quantization_config") or {}).get("quant_method")
    if plan.deployment.device == "cpu" and stored in _NOT_ON_CPU:
        raise UnsupportedArchitecture(
            f"{stored!r} is not served by the hf backend on a CPU: {_NOT_ON_CPU[stored]}",
            field="quantization_config.quant_method",
            hint="use --backend vllm, or the unquantized checkpoint with --quantization int8",
        )
    if quantization is None:
        return
    if quantization not in NEEDS:
        raise DeploymentError(
            f"the hf backend cannot quantize to {quantization}",
            field="--quantization",
            hint=f"use one of {', '.join(MADE_BY_FLAG)}, or a checkpoint quantized by gptq or awq",
        )
    if stored is None and quantization not in MADE_BY_FLAG:
        raise DeploymentError(
            f"{quantization} needs a calibration and cannot be made during the load",
            field="--quantization",
            hint="use a checkpoint that is already quantized, without --quantization",
        )
    module, install = NEEDS[quantization]
    if find_spec(module) is None:
        raise DeploymentError(f"{quantization} needs {module}", field="--quantization", hint=install)
    if quantization in ("gptq", "awq") and find_spec("optimum") is None:
        raise DeploymentError(f"{quantization} needs optimum", field="--quantization", hint=install)


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # file names that transformers 5.19 uses
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def require_weights(path: str) -> None:
    """Raise CheckpointError for a folder without safetensors; the message names any pickle files."""
    folder = Path(path)
    if not folder.is_dir() or any((folder / name).is_file() for name in _WEIGHTS):
        return
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder.name} has its weights in {pickles[0]} only, and loading a pickle can run any code",
            field="model",
            hint="convert it on an isolated machine: save_pretrained of transformers writes safetensors",
        )
    raise CheckpointError(
        f"{folder.name} has no weights: neither {_WEIGHTS[0]} nor its index",
        field="model",
        hint="download the weights",
    )


def require_gguf(path: str) -> None:
    """Raise DeploymentError if the package gguf is not installed."""
    if find_spec("gguf") is None:
        raise DeploymentError(
            f"{Path(path).name} needs the Python package gguf", field="model", hint="pip install gguf"
        )


def load_options(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Return the arguments of from_pretrained for checkpoint location and quantization.

    ``dtype`` is the torch.dtype in which the model computes.
    """
    # Filter the warning for every plan, because a checkpoint that is stored in 8 bits logs it, too.
    logging.getLogger(_INT8_LOGGER).addFilter(_is_no_cast_warning)
    path = plan.model.path
    if path.endswith(".gguf"):
        # Imported here, because the API process imports this module and must not import transformers.
        from transformers import GgufConfig

        require_gguf(path)
        # Unpack the weights: packed, they need the `kernels` package, which has no kernel for CPUs
        # (transformers, integrations/gguf).
        return {
            "pretrained_model_name_or_path": str(Path(path).parent),
            "gguf_file": Path(path).name,
            "quantization_config": GgufConfig(dequantize=True),
        }
    options: dict[str, Any] = {"pretrained_model_name_or_path": path, "use_safetensors": True}
    quantization = plan.deployment.quantization
    if quantization in MADE_BY_FLAG and not _stored(path):
        options["quantization_config"] = _bitsandbytes(quantization, dtype)
    return options


def _stored(path: str) -> bool:
    """Return whether the config.json of the checkpoint in ``path`` says that its weights are quantized."""
    return bool(json.loads((Path(path) / "config.json").read_text()).get("quantization_config"))


# MatMul8bitLt.forward warns in every call that it casts its input (bitsandbytes/autograd/_functions.py, 0.50):
# once for each linear layer of each forward. float16 would need no cast, but the dtype is the plan's.
_INT8_LOGGER = "bitsandbytes.autograd._functions"


def _is_no_cast_warning(record: logging.LogRecord) -> bool:
    """Return False for the warning that LLM.int8 casts its input to float16."""
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


def _bitsandbytes(quantization: str, dtype: Any) -> Any:
    # Imported here, because the API process imports this module and must not import transformers.
    from transformers import BitsAndBytesConfig

    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.removesuffix("-double"),
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=quantization.endswith("-double"),
    )
