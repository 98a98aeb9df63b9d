"""Put kernels in the place of modules of a loaded model whose arithmetic they reproduce.

Only bfloat16 on a CPU. Each replacement is tried on numbers first: a module whose own answer differs keeps its
own code, so an architecture needs no entry here. Weights stay where they are and are shared, not copied. The
self-check at start compares the whole model with what it computed before.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from tonnage.server.engines.hf.kernels import linear, small


class GatedMLP(nn.Module):
    """What ``_is_gated_mlp`` finds, for the types."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class RMSNorm(nn.Module):
    """What ``_is_rms_norm`` finds; some families say ``variance_epsilon``."""

    weight: nn.Parameter
    eps: float


# Relative difference (L2) up to which two bfloat16 computations count as the same: one rounding is 2^-9, a
# gated MLP rounds four times; another formula (another activation, a norm without its 1 + weight) is off by
# more than 0.1.
_SAME = 0.02
_SAME_NORM = 2**-8  # a norm rounds its result once; some families round between, too


def fuse(model: nn.Module) -> Counter[str]:
    """Replace what can be; returns how many modules of each kind were."""
    done: Counter[str] = Counter()
    for module in list(model.modules()):
        if _is_gated_mlp(module):
            mlps = [functools.partial(gated_mlp, module, act) for act in ACTIVATIONS.values()]
            done["gated mlp"] += _try(module, mlps, _SAME, module.gate_proj.in_features)
        elif _is_rms_norm(module):
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


def _is_gated_mlp(module: nn.Module) -> TypeGuard[GatedMLP]:
    projections = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(type(p) is nn.Linear and p.bias is None and linear.serves(p.weight) for p in projections)


def _is_rms_norm(module: nn.Module) -> TypeGuard[RMSNorm]:
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


def gated_mlp(module: GatedMLP, activation: tuple[float, float], x: torch.Tensor) -> torch.Tensor:
    inner = linear.gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return linear.linear(inner, module.down_proj.weight)


@torch.inference_mode()
def _try(
    module: nn.Module, replacements: Sequence[Callable[[torch.Tensor], torch.Tensor]], same: float, width: int
) -> bool:
    """Give the module the replacement that says most nearly what it says about a few random rows of ``width``,
    if that is the same. The first that is near enough will not do: where the weights of a norm are in the
    hundreds, leaving out the 1 of Gemma's 1 + weight changes a row by less than a rounding does."""
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
    x[2:4] *= 10  # activations differ only away from 0
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


_ROTATION = "apply_rotary_pos_emb"  # the name every family of transformers 5 gives it
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _with_rotation(module: nn.Module, rotate: Callable[..., None]) -> Callable[..., object] | None:
    """The module's forward with the rotary embedding in one pass: the same code, in which one name means
    another function. None where it does not call it plainly, or where the functions differ."""
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
    """``own``, in place on [1, heads, T, size] views of contiguous [1, T, heads, size]; else ``own`` itself
    where it is not one row of a head a token."""

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
        flat_q, flat_k = flat_q.contiguous(), flat_k.contiguous()  # a copy after a norm of each head
        rotate(flat_q, cosine[0], sine[0])
        rotate(flat_k, cosine[0], sine[0])
        return flat_q.transpose(0, 1)[None], flat_k.transpose(0, 1)[None]

    return apply


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """The model's own code for a while."""
    aside = [
        (module, module.__dict__.pop("forward")) for module in model.modules() if "forward" in module.__dict__
    ]
    try:
        yield
    finally:
        for module, forward in aside:
            module.forward = forward
