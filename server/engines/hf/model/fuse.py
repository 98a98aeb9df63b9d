"""Replacement of a loaded model's modules by bfloat16 CPU kernels with the same arithmetic.

Each kernel is first compared with its module on random input. A module whose result differs keeps its own code,
so no list of architectures is needed. The kernels use the module's weights without a copy. The self-check at
start compares the whole model with its own code.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tonnage.server.engines.hf.kernels import linear, small

# Relative difference (L2) up to which two bfloat16 results count as equal. One rounding changes a value by up
# to 2^-9, and a gated MLP rounds four times. A different formula (another activation, or a norm with weight
# instead of 1 + weight) changes the result by more than 0.1.
_SAME = 0.02
# Relative difference (L2) up to which the results of two norms count as equal. A norm rounds its result once,
# and in some families also an intermediate value.
_SAME_NORM = 2**-8


def fuse(model: nn.Module) -> Counter[str]:
    """Replace modules of a loaded model by CPU kernels; return the number of replaced modules of each kind."""
    done: Counter[str] = Counter()
    modules: list[Any] = list(model.modules())
    for module in modules:
        if _is_gated_mlp(module):
            mlps = [functools.partial(gated_mlp, module, act) for act in ACTIVATIONS.values()]
            done["gated mlp"] += _try(module, mlps, _SAME, module.gate_proj.in_features)
        elif _is_rms_norm(module):
            # Some families call ``eps`` ``variance_epsilon``.
            epsilon = getattr(module, "variance_epsilon", None) or module.eps
            norms = [
                functools.partial(small.rms_norm, weight=module.weight, epsilon=float(epsilon), shift=shift)
                for shift in (0.0, 1.0)
            ]
            done["rms norm"] += _try(module, norms, _SAME_NORM, module.weight.shape[0])
        if (forward := _with_rotation(module, small.rotate)) is not None:
            _replace(module, forward)
            done["rotation"] += 1
        if type(module) is nn.Linear and linear.serves(module.weight):
            _replace(module, functools.partial(linear.linear, weight=module.weight, bias=module.bias))
            done["linear"] += 1
    return done


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


_GELU = 2 * (2 / torch.pi) ** 0.5  # tanh form of GELU (Hendrycks and Gimpel, arXiv:1606.08415)
ACTIVATIONS = {"silu": (1.0, 0.0), "gelu_tanh": (_GELU, 0.044715 * _GELU)}


def _is_gated_mlp(module: nn.Module) -> bool:
    projections = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(type(p) is nn.Linear and p.bias is None and linear.serves(p.weight) for p in projections)


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, torch.Tensor)
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.ndim == 1
        and weight.shape[0] % 16 == 0
        and (hasattr(module, "variance_epsilon") or hasattr(module, "eps"))
    )


def gated_mlp(module: Any, activation: tuple[float, float], x: torch.Tensor) -> torch.Tensor:
    """Return down_proj(act(gate_proj(x)) * up_proj(x)) by the linear kernels.

    ``module`` has the three projections. ``activation`` has the coefficients (linear, cubic) of act, see
    ``rows.gate_row``.
    """
    inner = linear.gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return linear.linear(inner, module.down_proj.weight)


@torch.inference_mode()
def _try(
    module: nn.Module, replacements: Sequence[Callable[[torch.Tensor], torch.Tensor]], same: float, width: int
) -> bool:
    """Replace a module's forward by one of ``replacements`` that gives equal output.

    Returns whether the forward was replaced.

    Outputs on random rows of ``width`` values are equal if their relative difference (L2) is at most ``same``.
    Of several replacements with equal output, the one with the smallest difference is used. For example, if a
    norm's weights are in the hundreds, the formulas with weight and with 1 + weight both give equal output,
    because they differ by less than a rounding.
    """
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
    x[2:4] *= 10  # scale some rows up, because activation functions are nearly equal close to 0
    x[4:] *= 100
    x = x.bfloat16()
    own = module(x).float()

    def error(replacement: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return float(((replacement(x).float() - own).norm(dim=-1) / own.norm(dim=-1)).max())

    errors = [error(replacement) for replacement in replacements]
    best = min(range(len(errors)), key=lambda at: errors[at] if errors[at] == errors[at] else float("inf"))
    if not errors[best] <= same:
        return False
    _replace(module, replacements[best])
    return True


_ROTATION = "apply_rotary_pos_emb"  # name of the rotary embedding function in every family of transformers 5
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _with_rotation(module: nn.Module, rotate: Callable[..., None]) -> Callable[..., object] | None:
    """Return an attention module's forward with the rotary embedding by a kernel, or None if impossible.

    The new forward has the same code, with the global name of the rotary embedding function replaced. The
    replacement is impossible if the forward does not call the function by this name, or if kernel and function
    differ.
    """
    code = type(module).forward
    own = getattr(code, "__globals__", {}).get(_ROTATION)
    if own is None or _ROTATION not in code.__code__.co_names or code.__closure__ is not None:
        return None
    if next(((p.dtype, p.device.type) for p in module.parameters()), None) != (torch.bfloat16, "cpu"):
        return None
    fused = _rotation(own, rotate)
    draw = torch.Generator().manual_seed(0)
    q, k, cosine, sine = (
        torch.randn(shape, generator=draw).bfloat16()
        for shape in ((1, 3, 4, 64), (1, 3, 2, 64), (1, 3, 64), (1, 3, 64))
    )
    try:
        want = own(q.transpose(1, 2), k.transpose(1, 2), cosine, sine)
        got = fused(q.clone().transpose(1, 2), k.clone().transpose(1, 2), cosine, sine)
    except (TypeError, RuntimeError, ValueError):
        return None
    if any(
        float((a.float() - b.float()).norm()) > _SAME * float(a.float().norm())
        for a, b in zip(want, got, strict=True)
    ):
        return None
    scope = {**code.__globals__, _ROTATION: fused}
    copy = types.FunctionType(code.__code__, scope, code.__name__, code.__defaults__)
    copy.__kwdefaults__ = code.__kwdefaults__
    return types.MethodType(copy, module)


def _rotation(own: Rotation, rotate: Callable[..., None]) -> Rotation:
    """Return a rotary embedding function that rotates q and k in place by the kernel ``rotate``.

    q and k are [1, heads, T, size] views of [1, T, heads, size]. For other shapes or arguments the result calls
    ``own``, the model's function.
    """

    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = q.shape[-1]
        flat_q, flat_k = q[0].transpose(0, 1), k[0].transpose(0, 1)
        if (
            args
            or kwargs
            or len(q) != 1
            or size % 32
            or cosine.shape != (1, len(flat_q), size)
            or cosine.dtype != torch.bfloat16
            or not (cosine.is_contiguous() and sine.is_contiguous())
        ):
            return own(q, k, cosine, sine, *args, **kwargs)
        # `contiguous` makes a copy only if a norm was applied to each head before.
        flat_q, flat_k = flat_q.contiguous(), flat_k.contiguous()
        rotate(flat_q, cosine[0], sine[0])
        rotate(flat_k, cosine[0], sine[0])
        return flat_q.transpose(0, 1)[None], flat_k.transpose(0, 1)[None]

    return apply


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Restore the model's own forward methods, in place of kernels, while the context is open."""
    aside = [
        (module, module.__dict__.pop("forward")) for module in model.modules() if "forward" in module.__dict__
    ]
    try:
        yield
    finally:
        for module, forward in aside:
            module.forward = forward
