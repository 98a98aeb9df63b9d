"""Loading of a checkpoint through transformers, and the measurement of its bytes in memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from tonnage.planner.errors import CheckpointError, DeploymentError
from tonnage.planner.plans import Plan
from tonnage.server.engines.heap import trim
from tonnage.server.engines.hf.attention.interface import NAME, register
from tonnage.server.engines.hf.model.formats import load_options
from tonnage.server.text.gguf_reader_cache import cached_gguf_reader

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(plan: Plan) -> PreTrainedModel:
    """Load the planned model; return it in evaluation mode, with weights in anonymous (not mapped) memory.

    Raises:
        DeploymentError: the device does not compute in the plan's dtype.
        CheckpointError: tensors are missing from the checkpoint, or do not belong to the model. transformers
            would initialize missing weights at random and drop surplus tensors.
    """
    register()
    dtype = DTYPES[plan.deployment.dtype]
    require_computed(dtype, plan.deployment.device)
    options = load_options(plan, dtype)
    # transformers needs accelerate to load weights directly to a GPU. Without accelerate, weights are read into
    # host memory, and then moved to the GPU.
    placement = {"device_map": plan.deployment.device} if find_spec("accelerate") else {}
    with cached_gguf_reader() if "gguf_file" in options else contextlib.nullcontext():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            dtype=dtype,
            attn_implementation=NAME,
            **placement,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_require_complete` reports tensors of a wrong size
            **options,
        )
    model: PreTrainedModel = loaded[0] if placement else loaded[0].to(plan.deployment.device)
    _require_complete(loaded[1])
    model.train(False).requires_grad_(False)
    _own_memory(model)
    return model


def require_computed(dtype: torch.dtype, device: str) -> None:
    """Raise DeploymentError if the device cannot compute in ``dtype``.

    It tries the operations of a decoder layer on a small tensor.
    """
    try:
        x = torch.ones((1, 1, 2, 16), dtype=dtype, device=device)
        x = F.scaled_dot_product_attention(x, x, x)
        x = F.linear(F.silu(F.layer_norm(x, (16,))), x[0, 0])
        torch.softmax(x, dim=-1)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA raises AssertionError
        name = str(dtype).removeprefix("torch.")
        raise DeploymentError(
            f"torch {torch.__version__} does not compute in {name} on this {device}: "
            f"{str(error).splitlines()[0][:200]}",
            field="--dtype",
            hint="bfloat16 and float32 are computed on every CPU",
        ) from None


def _require_complete(info: dict[str, Any]) -> None:
    """Raise CheckpointError if from_pretrained found missing or surplus tensors in the checkpoint.

    ``info`` is the loading report of from_pretrained, which already leaves out optional keys.
    """
    for what, keys in (
        ("lacks {}", info["missing_keys"]),
        ("has {} in another shape than config.json gives", [name for name, *_ in info["mismatched_keys"]]),
        ("has {} that the model does not use", info["unexpected_keys"]),
    ):
        if keys:
            first = ", ".join(sorted(keys)[:3])
            tensors = f"{len(keys):,} tensor{'s' * (len(keys) > 1)}"
            more = f" and {len(keys) - 3:,} more" if len(keys) > 3 else ""
            raise CheckpointError(
                f"the checkpoint {what.format(tensors)}: {first}{more}",
                field="safetensors",
                hint="use the config.json that belongs to these weights",
            )


def _own_memory(model: torch.nn.Module) -> None:
    """Copy weights that still point into the mapped checkpoint file to anonymous memory.

    The memory plan counts only anonymous memory, and Linux may drop mapped pages and read them again during a
    request. Copying one tensor at a time keeps the memory peak low. Parameter classes of bitsandbytes are
    skipped, because their values are computed, not mapped.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for parameter in model.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.data = parameter.data.clone()
    gc.collect()
    trim()


def storage_bytes(model: torch.nn.Module) -> int:
    """Return the bytes in memory of a model's parameters, buffers and quantization state.

    Tensors that share a storage count once.
    """
    sizes: dict[int, int] = {}
    for tensor in _tensors(model, set()):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield every tensor of a module, with those in its attributes (bitsandbytes' quantization state)."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    if isinstance(value, dict):
        children: Any = list(value.values())
    elif isinstance(value, list | tuple | set):
        children = list(value)
    elif isinstance(value, torch.Tensor | torch.nn.Module) or type(value).__module__.startswith("bitsandbytes"):
        children = list(getattr(value, "__dict__", {}).values())
    else:
        return
    for child in children:
        yield from _tensors(child, seen)
