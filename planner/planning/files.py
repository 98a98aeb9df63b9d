"""Facts from a model's weight files: dtype, stored format, and whether the expected tensors exist."""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.headers.check import (
    check_index,
    check_tensors,
    floating_dtype,
    stored_tied_copies,
    tied_copies_in_index,
)
from tonnage.planner.headers.gguf_config import check_gguf
from tonnage.planner.headers.gguf_types import file_type, refuse_unknown
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import config_dtype
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.source.resolve import ModelSource


def with_file_type(source: ModelSource, deployment: Deployment) -> tuple[ModelSource, Deployment]:
    """Return the model as if its file had the GGUF type of --quantization, and flags without that type.

    A GGUF type is for example q4_k_m. With another value of --quantization, model and flags are returned
    unchanged.

    Raises:
        DeploymentError: the engine loads no GGUF files, or the model is quantized already.
    """
    name = deployment.quantization
    if name is None:
        return source, deployment
    refuse_unknown(name, "--quantization")
    if (kind := file_type(name)) is None:
        return source, deployment
    if not engine_of(deployment.engine).keeps_gguf:
        raise DeploymentError(
            f"{kind} is a GGUF file type, which {deployment.engine} does not keep", field="--quantization",
            hint="--engine llama.cpp",
        )  # fmt: skip
    from tonnage.planner.source.gguf import as_gguf  # lazy import, only for GGUF types

    return as_gguf(source, kind), replace(deployment, quantization=None)


def check_checkpoint(source: ModelSource, architecture: Architecture) -> tuple[TensorSpec, ...]:
    """Check that the checkpoint holds the tensors that its config requires.

    Returns the tied tensors that the checkpoint stores a second time, such as an output head equal to the
    embedding.
    """
    if source.index is not None:
        check_index(architecture, source.index, read_quantization(source.config, None))
        return tied_copies_in_index(architecture, source.index)
    if source.tensors is None:
        return ()
    if source.kind == "gguf":
        check_gguf(architecture, source.tensors)
        return ()
    check_tensors(architecture, source.tensors, read_quantization(source.config, None))
    return stored_tied_copies(architecture, source.tensors)


def auto_dtype(source: ModelSource) -> str:
    """Return the dtype that --dtype auto selects for this checkpoint.

    The order is that of transformers: the dtype of config.json, the checkpoint's tensors, float32. A GGUF file
    states no dtype and is dequantized to bfloat16 on load.
    """
    found = config_dtype(source.config.get("dtype", source.config.get("torch_dtype")))
    if found is None and source.kind == "gguf":
        return "bfloat16"
    if found is None and source.tensors is not None:
        found = floating_dtype(source.tensors)
    return found or "float32"


def stored_format(source: ModelSource, quantization: Quantization) -> Quantization:
    """Return the quantization format that an engine reads from the checkpoint's files.

    For a GGUF file it is GGUF's own format, although the plan counts its tensors as dequantized.
    """
    return Quantization("gguf", method="gguf") if source.kind == "gguf" else quantization
