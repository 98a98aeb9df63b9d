"""What autograd keeps: a symbolic forward pass that records the tensors PyTorch saves for the backward pass.

A layer is written down as the operations its module runs; each operation knows what it saves (the rules of
torch's derivatives.yaml, 2.13, and of the modules' own formulas). Sizes stay symbolic in batch b and
sequence s, so that one tape answers for every micro-batch and length. Tensors that share a storage are
counted once, as ``torch.autograd.graph.saved_tensors_hooks`` sees them; parameters are not counted.

tests/planner/test_training_activations.py holds the tapes against real models, within 2 %.
"""

from __future__ import annotations

from typing import NamedTuple

from tonnage.planner.records import dataclass, field

# the last parts of the modules PEFT's IA3 treats as feed-forward (peft/utils/constants.py, 0.21)
IA3_FEED_FORWARD = ("down_proj", "dense_4h_to_h", "mlp.c_proj", "fc2", "w2")


@dataclass(frozen=True, slots=True)
class Size:
    """A count or a number of bytes: ``token`` x b s + ``score`` x b s^2 + ``position`` x s + ``mask`` x b s^2 +
    ``fixed``."""

    token: int = 0
    score: int = 0
    position: int = 0
    mask: int = 0
    fixed: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.token + other.token, self.score + other.score, self.position + other.position,
            self.mask + other.mask, self.fixed + other.fixed,
        )  # fmt: skip

    def times(self, factor: int) -> Size:
        return Size(
            self.token * factor, self.score * factor, self.position * factor, self.mask * factor,
            self.fixed * factor,
        )  # fmt: skip

    def at(self, batch: int, length: int) -> int:
        """The value for ``batch`` sequences of ``length`` tokens."""
        square = length * length
        return (
            self.token * batch * length + self.score * batch * square + self.position * length
            + self.mask * batch * square + self.fixed
        )  # fmt: skip


@dataclass(slots=True)
class Value:
    """A tensor: ``size`` in elements, ``width`` bytes each, whether it needs a gradient, whether tensor
    parallelism splits it. ``base``: the tensor whose storage it shares."""

    size: Size
    width: int
    grad: bool
    split: bool = False
    base: Value | None = None
    casts: dict[int, Value] = field(default_factory=dict)

    @property
    def storage(self) -> Value:
        return self if self.base is None else self.base.storage


class Saved(NamedTuple):
    value: Value
    label: str


@dataclass(slots=True)
class Tape:
    """Records what is saved. ``compute``: bytes of matrix products under autocast (``autocast``), else the
    inputs' own. ``cuda``: dropout keeps a byte mask there, a full-width one on the CPU. ``weight``: bytes per
    trainable base weight, ``frozen`` per frozen one."""

    compute: int
    autocast: bool
    weight: int
    frozen: int
    attention: str = "sdpa"
    cuda: bool = True
    masked: bool = False  # this layer is given an explicit mask (sliding window)
    explicit_mask: bool = False  # transformers 4.57 and packed batches build a mask for every layer
    targets: frozenset[str] = frozenset()
    method: str = "full"
    rank: int = 0
    fp8: bool = False
    label: str = ""
    trainable: bool = True  # the layer's own weights
    saved: dict[int, Saved] = field(default_factory=dict)
    weight_casts: list[tuple[str, int, bool]] = field(default_factory=list)  # (module, bytes, frozen)

    def save(self, value: Value) -> None:
        storage = value.storage
        self.saved.setdefault(id(storage), Saved(storage, self.label))

    def new(self, token: int, width: int, grad: bool, *, split: bool = False) -> Value:
        return Value(Size(token=token), width, grad, split)

    def like(self, value: Value, width: int | None = None, grad: bool | None = None) -> Value:
        return Value(
            value.size,
            value.width if width is None else width,
            value.grad if grad is None else grad,
            value.split,
        )

    def view(self, of: Value, token: int) -> Value:
        return Value(Size(token=token), of.width, of.grad, of.split, base=of)

    def cast(self, value: Value, width: int) -> Value:
        """``value.to(dtype)``: a new tensor unless it has the type already; saves nothing."""
        return value if value.width == width else self.like(value, width)

    def linear(
        self, x: Value, name: str, into: int, out: int, *, bias: bool = False, column: bool = True
    ) -> Value:
        """x W^T: keeps x if W is trained (or its adapter is), W if x needs a gradient.

        ``column``: tensor parallelism splits the output (else the input is split and the output summed).
        """
        adapted = name in self.targets
        base_trained = self.trainable and self.method in ("full", "freeze")
        width = self.compute if self.autocast else x.width
        inputs = self.cast(x, width)
        feed_forward = name.endswith(IA3_FEED_FORWARD)
        if adapted and self.method == "ia3" and feed_forward:
            # IA3 scales the input of a feed-forward module in its own fp32: the product keeps that input
            self.save(self.cast(x, 4))
            if x.grad:
                self.save(Value(Size(fixed=into), 4, False))
            x = self.like(x, x.width, True)
            inputs = self.cast(x, width)
        if base_trained:
            self._save_input(inputs)
        grad = x.grad or base_trained
        stored = self.weight if base_trained else self.frozen
        # fp8 copies are 1 + 1 bytes a weight (as stored, and transposed for the backward pass), 16-bit ones 2
        if (self.fp8 or (self.autocast and stored == 4)) and (x.grad or base_trained):
            self.weight_casts.append((name, self.compute * into * out, not base_trained))
        result = self.new(out, width, grad, split=column)
        if adapted and self.method in ("lora", "qlora"):
            result = self._lora(x, result, width)
        elif adapted and self.method == "ia3" and not feed_forward:
            self.save(result)
            if result.grad:
                self.save(Value(Size(fixed=out), 4, False))
            result = self.like(result, width, True)
        if bias and base_trained:
            result.grad = True
        return result

    def _save_input(self, x: Value) -> None:
        if self.fp8:  # Transformer Engine keeps the quantized input
            x = self.like(x, 1)
        self.save(x)

    def _lora(self, x: Value, result: Value, width: int) -> Value:
        """PEFT: result + B(A(x)), x cast to the adapter's fp32 and, under autocast, back: a copy per module
        (peft/tuners/lora/layer.py, 0.21)."""
        adapter = self.cast(x, 4)
        adapter = self.cast(adapter, self.compute) if self.autocast else adapter
        self.save(adapter)
        low = self.new(self.rank, adapter.width, True)
        self.save(low)
        if self.autocast:
            into, out = x.size.token, result.size.token
            kept = self.rank * (into if x.grad else 0) + self.rank * out
            self.weight_casts.append(("lora", self.compute * kept, False))
        return self.like(result, width, True)

    def rms_norm(self, x: Value, width_of: int, *, groups: int = 1, gemma: bool = False) -> Value:
        """Norm over ``width_of`` values, ``groups`` of them per token, in fp32 as the modules do it: x^2 and
        x * rsqrt keep x in fp32; the product with a trained weight keeps the normalized tensor, in the
        model's type for Llama's class and in fp32 for Gemma's."""
        wide = self.cast(x, 4)
        if x.grad:
            self.save(wide)
            self.save(self.new(groups, 4, True, split=x.split))  # rsqrt(variance)
        normal = self.like(wide)
        trained = self.trainable and self.method in ("full", "freeze")
        if gemma:
            if trained:
                self.save(normal)
            if x.grad:
                self.save(Value(Size(fixed=width_of), 4, False))  # 1 + weight
            return self.cast(self.like(normal, 4, x.grad or trained), x.width)
        narrow = self.cast(normal, x.width)
        if trained:
            self.save(narrow)
        weight = self.weight if trained else self.frozen
        return self.like(x, max(weight, x.width) if weight == 4 else x.width, x.grad or trained)

    def layer_norm(self, x: Value) -> Value:
        """torch's fused one: keeps the input, mean and 1/std; fp32 under CUDA's autocast, not the CPU's."""
        x = self.cast(x, 4) if self.autocast and self.cuda else x
        trained = self.trainable and self.method in ("full", "freeze")
        if x.grad or trained:
            self.save(x)
            self.save(self.new(2, 4 if self.cuda else x.width, True))
        return self.like(x, grad=x.grad or trained)

    def activation(self, x: Value, kind: str) -> Value:
        out = self.like(x)
        if not x.grad:
            return out
        if kind == "relu":
            self.save(out)
        elif kind in ("gelu_new", "gelu_fast"):  # written out in Python: x, x/2, tanh, 1 + tanh
            self.save(x)
            for _ in range(3):
                self.save(self.like(x))
        else:  # silu, gelu, gelu_pytorch_tanh: fused, keep the input
            self.save(x)
        return out

    def multiply(self, a: Value, b: Value) -> Value:
        if a.grad:
            self.save(b)
        if b.grad:
            self.save(a)
        return self.like(a, max(a.width, b.width), a.grad or b.grad)

    def dropout(self, x: Value, probability: float) -> Value:
        if probability and x.grad:
            self.save(self.like(x, 1 if self.cuda else x.width))
        return self.like(x) if probability else x

    def rotate(self, x: Value, tables: tuple[Value, Value], *, partial: bool = False) -> Value:
        """Rotary embedding: x cos + rotate(x) sin keeps the tables only."""
        if x.grad:
            for table in tables:
                self.save(table)
        return self.like(x, max(x.width, tables[0].width))

    def attend(
        self, q: Value, k: Value, v: Value, heads: int, kv_heads: int, head: int, *,
        masked: bool = False, softcap: bool = False, dropout: float = 0.0, softmax: int = 4,
        heads_first: bool = False,
    ) -> Value:  # fmt: skip
        """Attention of ``heads`` query heads; the output is [b, s, heads x head]. ``masked``: an explicit
        mask is passed (sliding windows, packed batches), which keeps SDPA from grouping KV heads.
        ``heads_first``: q lies in memory as [b, heads, s, head]; the output follows it and is copied before
        the output projection reads it."""
        width = self.compute if self.autocast else q.width
        if self.attention == "eager":
            return self._eager(q, k, v, heads, kv_heads, head, softcap, dropout, softmax, width)
        grouped = kv_heads == heads or self.attention == "flash" or not (masked or self.explicit_mask)
        if not grouped:
            k, v = (self.new(heads * head, t.width, t.grad, split=True) for t in (k, v))
        q, k, v = (self.cast(t, width) for t in (q, k, v))
        grad = q.grad or k.grad or v.grad
        out = self.new(heads * head, width, grad, split=True)
        if grad:
            for tensor in (q, k, v, out):
                self.save(tensor)
            self.save(self.new(heads, 4, True, split=True))  # log-sum-exp
            if self.attention == "sdpa" and (masked or self.explicit_mask):
                # the boolean mask becomes an additive one of the queries' type, kept by every layer
                self.save(Value(Size(mask=1), width, False))
        return self.like(out) if heads_first else out

    def _eager(
        self, q: Value, k: Value, v: Value, heads: int, kv_heads: int, head: int, softcap: bool,
        dropout: float, softmax: int, width: int,
    ) -> Value:  # fmt: skip
        if kv_heads != heads:
            k, v = (self.new(heads * head, t.width, t.grad, split=True) for t in (k, v))
        q, k, v = (self.cast(t, width) for t in (q, k, v))
        grad = q.grad or k.grad

        def scores(size: int, needs: bool) -> Value:
            return Value(Size(score=heads), size, needs, True)

        if k.grad:
            self.save(self.like(q))  # bmm's operands are copies where batch and heads cannot be merged
        if q.grad:
            self.save(self.like(k))
        if grad:
            if softcap:
                self.save(scores(width, True))  # tanh keeps its result
            weights = scores(softmax, True)
            self.save(weights)  # softmax keeps its result
        else:
            weights = scores(width, False)
        weights = self.cast(weights, width)
        if dropout and grad:
            self.save(self.like(weights, 1 if self.cuda else width))
            weights = self.like(weights)
        if v.grad:
            self.save(weights)
        if grad:
            self.save(self.like(v))
        return self.new(heads * head, width, grad or v.grad, split=True)

    def total(self, label: str | None = None, *, split: bool | None = None) -> Size:
        """Bytes kept, of one label, of what tensor parallelism splits or does not, or all."""
        out = Size()
        for saved in self.saved.values():
            if (label is None or saved.label == label) and (split is None or saved.value.split == split):
                out = out + saved.value.size.times(saved.value.width)
        return out
