"""Put kernels in the place of modules of a loaded model whose arithmetic they reproduce.

Only bfloat16 on a CPU. Each replacement is tried on numbers first: a module whose own answer differs keeps its
own code, so an architecture needs no entry here. Weights stay where they are and are shared, not copied. The
self-check at start compares the whole model with what it computed before.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

# Relative difference (L2) up to which two bfloat16 computations count as the same: one rounding is 2^-9, a
# gated MLP rounds four times; another formula (another activation, a norm without its 1 + weight) is off by
# more than 0.1.
_SAME = 0.02


def fuse(model: nn.Module) -> Counter[str]:
    """Replace what can be; returns how many modules of each kind were."""
    done: Counter[str] = Counter()
    try:
        from tonnage.server.engines.hf.kernels import linear, small
    except ImportError:  # numba is not installed
        return done
    for module in list(model.modules()):
        if _is_gated_mlp(module):
            for act in ACTIVATIONS:
                if _try(module, functools.partial(_mlp, module, ACTIVATIONS[act], linear)):
                    done["gated mlp"] += 1
                    break
        elif _is_rms_norm(module):
            epsilon = getattr(module, "variance_epsilon", None) or module.eps
            for shift in (0.0, 1.0):
                norm = functools.partial(
                    small.rms_norm, weight=module.weight, epsilon=float(epsilon), shift=shift
                )
                if _try(module, norm):
                    done["rms norm"] += 1
                    break
        if type(module) is nn.Linear and linear.serves(module.weight):
            module.forward = functools.partial(linear.linear, weight=module.weight, bias=module.bias)
            done["linear"] += 1
    return done


_GELU = 2 * (2 / torch.pi) ** 0.5  # tanh form of GELU (Hendrycks and Gimpel, arXiv:1606.08415)
ACTIVATIONS = {"silu": (1.0, 0.0), "gelu_tanh": (_GELU, 0.044715 * _GELU)}


def _is_gated_mlp(module: nn.Module) -> bool:
    from tonnage.server.engines.hf.kernels.linear import serves

    projections = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(type(p) is nn.Linear and p.bias is None and serves(p.weight) for p in projections)


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


def _mlp(module: nn.Module, activation: tuple[float, float], linear, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    inner = linear.gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return linear.linear(inner, module.down_proj.weight)


@torch.inference_mode()
def _try(module: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Give the module the replacement if both say the same about a few random rows."""
    width = module.gate_proj.in_features if hasattr(module, "gate_proj") else module.weight.shape[0]
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
    x[2:4] *= 10  # activations differ only away from 0
    x[4:] *= 100
    x = x.bfloat16()
    own, other = module(x).float(), replacement(x).float()
    if not bool(((own - other).norm(dim=-1) <= _SAME * own.norm(dim=-1)).all()):
        return False
    module.forward = replacement  # type: ignore[method-assign]
    return True


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
