"""Load a checkpoint through transformers and count the bytes it really holds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tonnage.planner.plan import Plan
from tonnage.server.engines.hf.attention import NAME, register
from tonnage.server.engines.hf.formats import load_options

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(plan: Plan) -> torch.nn.Module:
    """The model in evaluation mode, weights in memory of its own (not mapped from the file)."""
    register()
    dtype = DTYPES[plan.deployment.dtype]
    model = AutoModelForCausalLM.from_pretrained(
        dtype=dtype,
        attn_implementation=NAME,
        device_map=plan.deployment.device,
        trust_remote_code=False,
        local_files_only=True,
        **load_options(plan, dtype),
    )
    model = model.eval().requires_grad_(False)
    _own_memory(model)
    return model


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
