"""Replacement of whole decoder layers by one kernel call each (``kernels.layer``).

It runs after ``fuse.fuse`` and considers a layer only if a kernel replaced each of its modules. The layer's own
code and the single call must give identical bits and write identical K and V. A layer with extra arithmetic,
such as a factor on the residual, fails this test and keeps its own code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tonnage.planner.model.layout import KVLayout
from tonnage.server.engines.hf.attention.in_place import InPlaceAttention, Scratch
from tonnage.server.engines.hf.attention.interface import PagedBatch
from tonnage.server.engines.hf.batch import batch_of
from tonnage.server.engines.hf.kernels import layer as kernel
from tonnage.server.engines.hf.kernels import linear, small
from tonnage.server.engines.hf.model.fuse import gated_mlp
from tonnage.server.engines.hf.pool import PagedPool


def fuse_layers(model: nn.Module, layout: KVLayout, query_heads: int, threads: int) -> int:
    """Replace decoder layers of a model after `fuse.fuse` by one kernel call each; return how many."""
    trial = _Trial(layout, query_heads, threads)
    return sum(
        trial.adopt(module, parts) for module in model.modules() if (parts := _parts(module)) is not None
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The weights and constants that the one-call kernel of a decoder layer needs.

    Attributes:
        weights: weight tensors by their names in `kernels.layer.WEIGHTS`.
        epsilon: epsilon of the layer's RMS norms.
        shift: value added to norm weights, 0 or 1.
        activation: coefficients (linear, cubic) of the MLP's activation, see ``rows.gate_row``.
    """

    weights: dict[str, torch.Tensor]
    epsilon: float
    shift: float
    activation: tuple[float, float]


def _kernel_of(module: Any, function: Callable[..., Any]) -> functools.partial[Any] | None:
    """Return the CPU kernel that replaced a module's forward, if the kernel calls ``function``; else None."""
    forward = getattr(module, "__dict__", {}).get("forward")
    return forward if isinstance(forward, functools.partial) and forward.func is function else None


def _parts(module: nn.Module) -> _Parts | None:
    """Return a decoder layer's weights and constants for the one-call kernel, or None if the layer is unfit.

    A layer is fit if its modules have the attribute names of the Llama or Gemma family and all run as kernels.
    """
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    gated = _kernel_of(mlp, gated_mlp)
    if attention is None or gated is None:
        return None
    names = {"input norm": "input_layernorm", "mlp norm": "post_attention_layernorm"}
    # Gemma also norms the outputs of attention and MLP before the residual sums.
    if hasattr(module, "pre_feedforward_layernorm"):
        names["attention norm"] = "post_attention_layernorm"
        names["mlp norm"], names["output norm"] = "pre_feedforward_layernorm", "post_feedforward_layernorm"
    norms = {name: getattr(module, own, None) for name, own in names.items()}
    if hasattr(attention, "q_norm"):
        norms |= {"q norm": attention.q_norm, "k norm": getattr(attention, "k_norm", None)}
    weights, numbers = {}, set()
    for name, norm in norms.items():
        if (found := _kernel_of(norm, small.rms_norm)) is None:
            return None
        weights[name] = found.keywords["weight"]
        numbers.add((found.keywords["epsilon"], found.keywords["shift"]))
    biases = 0
    for name in ("q", "k", "v", "o"):
        if (found := _kernel_of(getattr(attention, f"{name}_proj", None), linear.linear)) is None:
            return None
        weights[name] = found.keywords["weight"]
        if (bias := found.keywords["bias"]) is not None:
            biases += 1
            weights[f"{name} bias"] = bias
    weights |= {name: getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down")}
    if "o bias" in weights or biases not in (0, 3) or len(numbers) != 1:
        return None
    (epsilon, shift), *_ = numbers
    return _Parts(weights, epsilon, shift, gated.args[1])


class OneCall:
    """A replacement for the forward of one decoder layer, which computes the layer in a single kernel call."""

    def __init__(
        self, module: nn.Module, parts: _Parts, layout: KVLayout, scaling: float, softcap: float | None
    ) -> None:
        self._own = type(module).forward.__get__(module)
        self._weights = [parts.weights.get(name) for name in kernel.WEIGHTS]
        self._addresses = np.array([0 if w is None else w.data_ptr() for w in self._weights], np.int64)
        self._place: int = module.self_attn.layer_idx  # type: ignore[union-attr, assignment]
        self._inner, self._hidden = parts.weights["gate"].shape
        self._heads = parts.weights["q"].shape[0] // layout.head_size
        self._size = layout.head_size
        self._scaling, self._softcap = scaling, softcap
        numbers = (parts.epsilon, parts.shift, *parts.activation)
        self._numbers = tuple(np.float32(number) for number in numbers)
        self._row = kernel.work_values(self._hidden, self._heads, layout.kv_heads, self._size, self._inner)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        paged_batch: PagedBatch | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the layer by one kernel call, or by the module's own code if the arguments are unexpected."""
        step = None if paged_batch is None else paged_batch.attention
        if (
            not isinstance(step, InPlaceAttention)
            or args
            or position_embeddings is None
            or not hidden_states.is_contiguous()
            or not self._turns(*position_embeddings, hidden_states.shape[1])
        ):
            return self._own(
                hidden_states,
                *args,
                position_embeddings=position_embeddings,
                paged_batch=paged_batch,
                **kwargs,
            )
        assert paged_batch is not None
        paged_batch.calls += 1
        cosine, sine = position_embeddings
        rows = hidden_states.shape[1]
        out = torch.empty_like(hidden_states)
        kernel.layer(
            hidden_states.data_ptr(),
            out.data_ptr(),
            *step.memory(rows * self._row),
            self._addresses,
            cosine.data_ptr(),
            sine.data_ptr(),
            rows,
            self._hidden,
            self._inner,
            *self._numbers,
            *step.arguments(*paged_batch.place[self._place], self._heads, self._scaling, self._softcap),
        )
        return out

    def _turns(self, cosine: torch.Tensor, sine: torch.Tensor, rows: int) -> bool:
        """Return whether the rotary cosine and sine are bfloat16 [1, rows, head size], as required."""
        return (
            cosine.shape == sine.shape == (1, rows, self._size)
            and cosine.dtype == sine.dtype == torch.bfloat16
            and cosine.is_contiguous()
            and sine.is_contiguous()
        )


class _Recorded:
    """A wrapper of an attention that records the scaling and the softcap of each call."""

    def __init__(self, attention: InPlaceAttention) -> None:
        self._attention = attention
        self.asked: list[tuple[float, float | None]] = []

    def __call__(self, *args: Any) -> torch.Tensor:
        self.asked.append(args[-2:])
        return self._attention(*args)


class _Trial:
    """A comparison of a model's decoder layers with the kernel that computes a layer in one call.

    The batch has two sequences, with three tokens and one token. Layer and kernel write to separate pools, so
    that K and V can be compared, too.
    """

    def __init__(self, layout: KVLayout, query_heads: int, threads: int) -> None:
        self._layout, self._heads = layout, query_heads
        self._pools = [PagedPool(layout, 3, torch.device("cpu")) for _ in range(2)]
        self._scratch = Scratch(self._pools[0], threads)
        self._batch = batch_of(
            np.zeros(4, np.int64),
            np.array([0, 4]),
            np.array([3, 1]),
            [np.array([[1], [2]], np.int32)] * len(layout.groups),
            layout.block_size,
            np.array([2, 3]),
        )
        draw = torch.Generator().manual_seed(0)
        cosine, sine = (torch.randn(1, 4, layout.head_size, generator=draw).bfloat16() for _ in range(2))
        self._angles = cosine, sine
        self._draw = draw

    def _step(self, pool: PagedPool) -> InPlaceAttention:
        return InPlaceAttention(self._batch, pool, self._heads, self._scratch)

    @torch.inference_mode()
    def adopt(self, module: nn.Module, parts: _Parts) -> bool:
        """Replace a decoder layer's forward by one kernel call if both give equal outputs, K and V.

        Returns whether the forward was replaced.
        """
        hidden = parts.weights["gate"].shape[1]
        q, kv = (self._layout.head_size * heads for heads in (self._heads, self._layout.kv_heads))
        shapes = {name: tuple(weight.shape) for name, weight in parts.weights.items()}
        if self._layout.head_size % 32 or [shapes[name] for name in "qkvo"] != [
            (q, hidden), (kv, hidden), (kv, hidden), (hidden, q)
        ]:  # fmt: skip
            return False
        x = torch.randn(1, 4, hidden, generator=self._draw)
        x[:, ::2] *= 30  # test small and large terms of the residual sums
        x = x.bfloat16()
        for pool in self._pools:
            pool.tensor.zero_()
        own, recorded = self._pools[0], _Recorded(self._step(self._pools[0]))
        try:
            want = module(
                x.clone(),
                attention_mask=None,
                position_ids=torch.from_numpy(self._batch.positions)[None],
                position_embeddings=self._angles,
                past_key_values=None,
                paged_batch=PagedBatch(recorded, own),
            )
        except Exception:  # a layer that needs other arguments may raise any error
            return False
        if len(recorded.asked) != 1:
            return False
        call = OneCall(module, parts, self._layout, *recorded.asked[0])
        other = self._pools[1]
        got = call(x, position_embeddings=self._angles, paged_batch=PagedBatch(self._step(other), other))
        same = (
            isinstance(want, torch.Tensor) and torch.equal(want, got) and torch.equal(own.tensor, other.tensor)
        )
        if same:
            module.forward = call
        return same
