"""Load a checkpoint through transformers and count the bytes it really holds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from tonnage.planner.errors import CheckpointError, DeploymentError
from tonnage.planner.plans import Plan
from tonnage.server.engines.hf.attention.interface import NAME, register
from tonnage.server.engines.hf.model.formats import load_options
from tonnage.server.text.gguf_reader_cache import cached_gguf_reader

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(plan: Plan) -> PreTrainedModel:
    """The model in evaluation mode, weights in memory of its own (not mapped from the file).

    Raises DeploymentError for a dtype the device does not compute in, CheckpointError for a checkpoint that is
    not exactly this model: transformers draws missing weights at random and drops those it has no use for.
    """
    register()
    dtype = DTYPES[plan.deployment.dtype]
    require_computed(dtype, plan.deployment.device)
    options = load_options(plan, dtype)
    with cached_gguf_reader() if "gguf_file" in options else contextlib.nullcontext():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            dtype=dtype,
            attn_implementation=NAME,
            device_map=plan.deployment.device,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported with the others, not raised one at a time
            **options,
        )
    model: PreTrainedModel = loaded[0]
    _require_complete(loaded[1])
    model.train(False).requires_grad_(False)
    _own_memory(model)
    return model


def require_computed(dtype: torch.dtype, device: str) -> None:
    """Raise DeploymentError unless the device has the arithmetic of a decoder layer in ``dtype``."""
    try:
        x = torch.ones((1, 1, 2, 16), dtype=dtype, device=device)
        x = F.scaled_dot_product_attention(x, x, x)
        x = F.linear(F.silu(F.layer_norm(x, (16,))), x[0, 0])
        torch.softmax(x, dim=-1)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        name = str(dtype).removeprefix("torch.")
        raise DeploymentError(
            f"torch {torch.__version__} does not compute in {name} on this {device}: "
            f"{str(error).splitlines()[0][:200]}",
            field="--dtype",
            hint="bfloat16 and float32 are computed on every CPU",
        ) from None


def _require_complete(info: dict[str, Any]) -> None:
    """``info``: what from_pretrained reports beside the model, by transformers' own rules about keys that a
    family may leave out or carry along."""
    for what, keys in (
        ("lacks", info["missing_keys"]),
        ("has in another shape than config.json gives", [name for name, *_ in info["mismatched_keys"]]),
        ("has, beside what this model uses,", info["unexpected_keys"]),
    ):
        if keys:
            first = ", ".join(sorted(keys)[:3])
            more = f" and {len(keys) - 3:,} more" if len(keys) > 3 else ""
            raise CheckpointError(
                f"the checkpoint {what} {len(keys):,} tensor{'s' * (len(keys) > 1)}: {first}{more}",
                field="safetensors",
                hint="config.json and the weights do not belong together",
            )


def _own_memory(model: torch.nn.Module) -> None:
    """Copy parameters that still point into the mapped file: a plan counts anonymous memory, and mapped pages
    may be dropped by the kernel and read again in the middle of a request. One tensor at a time, so that the
    peak stays the sum; bitsandbytes' own parameter classes were computed, never mapped."""
    if next(model.parameters()).device.type != "cpu":
        return
    for parameter in model.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.data = parameter.data.clone()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only: give freed loading buffers back
        ctypes.CDLL(None).malloc_trim(0)


def storage_bytes(model: torch.nn.Module) -> int:
    """Sum of the storages behind parameters, buffers and quantization state, each storage once."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(model, set()):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor reachable from a module: attributes too, since bitsandbytes keeps its state in objects."""
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
