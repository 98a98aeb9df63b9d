"""What a model's files say beside its config, and whether they hold what it promises."""

from __future__ import annotations

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import config_dtype
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.source.resolve import ModelSource


def check_checkpoint(source: ModelSource, architecture: Architecture) -> tuple[TensorSpec, ...]:
    """The checkpoint must hold the tensors its config promises. Returns tied ones it stores twice."""
    if source.index is not None:
        from tonnage.planner.headers.check import check_index, copies_by_index

        check_index(architecture, source.index, read_quantization(source.config, None))
        return copies_by_index(architecture, source.index)
    if source.tensors is None:
        return ()
    if source.kind == "gguf":
        from tonnage.planner.headers.gguf_config import check_gguf

        check_gguf(architecture, source.tensors)
        return ()
    from tonnage.planner.headers.check import check_tensors, stored_tied_copies

    check_tensors(architecture, source.tensors, read_quantization(source.config, None))
    return stored_tied_copies(architecture, source.tensors)


def auto_dtype(source: ModelSource) -> str:
    """What ``--dtype auto`` means: config.json's dtype, else the checkpoint's, else float32 (transformers'
    own order). A GGUF file states none and is dequantized while loading: bfloat16."""
    found = config_dtype(source.config.get("dtype", source.config.get("torch_dtype")))
    if found is None and source.kind == "gguf":
        return "bfloat16"
    if found is None and source.tensors is not None:
        from tonnage.planner.headers.check import floating_dtype

        found = floating_dtype(source.tensors)
    return found or "float32"


def stored_format(source: ModelSource, quantization: Quantization) -> Quantization:
    """What an engine has to read: GGUF's own types are no quantization of the plan, which has them unpacked."""
    return Quantization("gguf", method="gguf") if source.kind == "gguf" else quantization
