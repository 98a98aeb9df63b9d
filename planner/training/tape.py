"""A symbolic forward pass that records which tensors autograd keeps for the backward pass.

A layer is described by the operations that its module runs. Each operation records the tensors that autograd
saves for it, by torch's derivatives.yaml (2.13) and the modules' formulas. Sizes are polynomials in the batch b
and the sequence length s, so one tape serves every micro-batch and length. Tensors that share a storage are
counted once, as `torch.autograd.graph.saved_tensors_hooks` sees them. Parameters are not counted.

Tests compare the tapes with real models, to within a few bytes (tests/planner/test_training_activations.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tonnage.planner.training.values import Extent, Kernels, Value

# Last components of module names that PEFT's IA3 treats as feed-forward (peft/utils/constants.py, 0.21)
IA3_FEED_FORWARD = ("down_proj", "dense_4h_to_h", "mlp.c_proj", "fc2", "w2")


# Activation functions composed of single operations (transformers 5.19, activations.py) -> number of tensors
# that each function keeps besides its input
WRITTEN_OUT = {"gelu_fast": 6, "quick_gelu": 1}
CLAMPED = "clamped-swiglu"  # our name for the activation of gpt-oss's experts, which ACT2FN does not have
ACTIVATIONS = frozenset(
    (
        "silu",
        "swish",
        "gelu",
        "gelu_pytorch_tanh",
        "gelu_new",
        "relu",
        "relu2",
        "tanh",
        "sigmoid",
        "xielu",
        CLAMPED,
    )
) | frozenset(WRITTEN_OUT)


@dataclass(slots=True)
class Tape:
    """A recording of the tensors that one layer saves for its backward pass.

    Attributes:
        compute: bytes of an element in matrix products under autocast. Without autocast, matrix products have
            the width of their input.
        autocast: whether torch.autocast is on.
        weight: bytes of one trained base weight (a weight of the model, not of an adapter).
        frozen: bytes of one frozen base weight.
        attention: `flash`, `sdpa` or `eager`.
        cuda: whether the layer runs on a GPU, where dropout's mask has one byte per element. On a CPU the mask
            has the tensor's width.
        masked: whether the layer has an explicit attention mask, as for a sliding window.
        single: whether the batch is one sequence, so that batch and heads merge without a copy.
        explicit_mask: whether every layer has a mask, as in transformers 4.57 and with packed batches.
        targets: name patterns of the modules that have adapters.
        method: training method.
        rank: LoRA rank.
        fp8: whether Transformer Engine keeps the inputs of linear layers in fp8.
        kernels: how the training library's modules differ from transformers' in the tensors that they keep.
        trainable: whether the layer's own weights are trained, as they are by the methods `full` and `freeze`.
        saved: saved tensors by the `id` of the tensor that owns the storage.
        weight_casts: (module, bytes, whether the weight is frozen) of each cast weight.
    """

    compute: int
    autocast: bool
    weight: int
    frozen: int
    attention: str = "sdpa"
    cuda: bool = True
    masked: bool = False
    single: bool = False
    explicit_mask: bool = False
    targets: frozenset[str] = frozenset()
    method: str = "full"
    rank: int = 0
    fp8: bool = False
    kernels: Kernels = Kernels()
    trainable: bool = True
    saved: dict[int, Value] = field(default_factory=dict)
    weight_casts: list[tuple[str, int, bool]] = field(default_factory=list)

    def save(self, value: Value) -> None:
        """Record the tensor `value` as kept for the backward pass; tensors that share a storage count once."""
        storage = value.storage
        self.saved.setdefault(id(storage), storage)

    def _keep(self, value: Value) -> None:
        """Record a pointwise operation's operand as kept for training, unless torch.compile recomputes it."""
        if not (self.kernels.compiled and value.pointwise):
            self.save(value)

    def _fused(self, value: Value) -> Value:
        """Mark `value` as a pointwise operation's result, which torch.compile can recompute, and return it."""
        value.pointwise = bool(self.kernels.compiled)
        return value

    def new(self, token: int, width: int, grad: bool, *, split: bool = False) -> Value:
        """Return a new symbolic tensor of `token` elements per token and `width` bytes per element."""
        return Value(Extent(token=token), width, grad, split)

    def like(self, value: Value, width: int | None = None, grad: bool | None = None) -> Value:
        """Return a new symbolic tensor of the size of `value`, by default also with its `width` and `grad`."""
        return Value(
            value.size,
            value.width if width is None else width,
            value.grad if grad is None else grad,
            value.split,
        )

    def view(self, of: Value, token: int) -> Value:
        """Return a symbolic view of the tensor `of`, with `token` elements per token and the same storage."""
        return Value(Extent(token=token), of.width, of.grad, of.split, base=of)

    def cast(self, value: Value, width: int) -> Value:
        """Return the symbolic tensor `value`, cast to elements of `width` bytes; autograd keeps nothing."""
        if value.width == width:
            return value
        if not self.kernels.compiled:
            return self.like(value, width)
        if width not in value.casts:  # A compiler casts a tensor to a width only once.
            value.casts[width] = self._fused(self.like(value, width))
        return value.casts[width]

    def add(self, a: Value, residual: Value) -> Value:
        """Record the sum of `a` and `residual`, which keeps no tensor, and return it in the wider dtype."""
        out = Value(residual.size, max(a.width, residual.width), a.grad or residual.grad)
        if self.kernels.compiled and (a.pointwise or a.width < out.width):
            # The compiler recomputes `a + residual` in the backward pass; the residual is kept anyway.
            out.instead = a
        return out

    def scale(self, x: Value) -> Value:
        """Record and return the product of `x` and a learned vector; if the vector is trained, `x` is kept."""
        if self.trainable:
            self.save(x)
        return self.like(x, max(x.width, self.weight), x.grad or self.trainable)

    def linear(self, x: Value, name: str, into: int, out: int, *, column: bool = True) -> Value:
        """Record the linear layer `name` on the tape and return its output x W^T.

        The backward pass keeps x if W or its adapter is trained, and a cast of W if x needs a gradient. With
        `column`, tensor parallelism splits the output; otherwise it splits the input and sums the outputs.
        """
        adapted = name in self.targets
        base_trained = self.trainable
        width = self.compute if self.autocast else x.width
        inputs = self.cast(x, width)
        feed_forward = name.endswith(IA3_FEED_FORWARD)
        if adapted and self.method == "ia3" and feed_forward:
            # IA3 scales a feed-forward module's input in fp32, and autograd keeps that input.
            self.save(self.cast(x, 4))
            if x.grad:
                self.save(Value(Extent(fixed=into), 4, False))
            x = self.like(x, x.width, True)
            inputs = self.cast(x, width)
        if base_trained:
            self._save_input(inputs)
        grad = x.grad or base_trained
        stored = self.weight if base_trained else self.frozen
        # An fp8 weight has two copies of 1 byte (as stored, and transposed for the backward pass). A 16-bit
        # copy takes 2 bytes.
        unpacked = self.kernels.quantized and name != "lm_head"
        if (self.fp8 or (self.autocast and stored == 4 and not unpacked)) and (x.grad or base_trained):
            self.weight_casts.append((name, self.compute * into * out, not base_trained))
        result = self.new(out, width, grad, split=column)
        if adapted and self.method in ("lora", "qlora"):
            result = self._lora(x, result, width)
        elif adapted and self.method == "ia3" and not feed_forward:
            self.save(result)
            if result.grad:
                self.save(Value(Extent(fixed=out), 4, False))
            result = self.like(result, width, True)
        return result

    def product(self, x: Value, out: int) -> Value:
        """Record the product x W^T on the tape and return it; the matrix W has the dtype of x and no adapter.

        Autocast does not cast such a matrix.
        """
        if self.trainable:
            self.save(x)
        return self.new(out, x.width, x.grad or self.trainable)

    def _save_input(self, x: Value) -> None:
        """Record a linear layer's input as kept for training, in fp8 if Transformer Engine runs the layer."""
        if self.fp8:  # Transformer Engine keeps the quantized input
            x = self.like(x, 1)
        if not (self.kernels.compiled == "least" and x.pointwise):
            self.save(x)

    def _lora(self, x: Value, result: Value, width: int) -> Value:
        """Record a LoRA adapter on the tape and return `result` + B(A(x)), its linear layer's output.

        PEFT casts x to the adapter's fp32 and, under autocast, back to 16 bits: one copy per module
        (peft/tuners/lora/layer.py, 0.21).
        """
        if self.kernels.as_input:
            adapter = self.cast(x, width)
            self._save_input(adapter)
        else:
            adapter = self.cast(x, 4)
            adapter = self.cast(adapter, self.compute) if self.autocast else adapter
            self.save(adapter)
        low = self.new(self.rank, adapter.width, True)
        if self.kernels.compiled != "least":
            self.save(low)
        if self.autocast:
            into, out = x.size.token, result.size.token
            kept = self.rank * (into if x.grad else 0) + self.rank * out
            self.weight_casts.append(("lora", self.compute * kept, False))
        return self.like(result, width, True)

    def rms_norm(self, x: Value, size: int, groups: int = 1, kind: str = "rms") -> Value:
        """Record an RMSNorm on the tape and return `x` after it.

        The norm runs over `size` values, `groups` times per token, and is computed in fp32.

        The operations x^2 and x * rsqrt(variance) keep x in fp32. The product with a trained weight keeps the
        normalized tensor: in the model's dtype for kind `rms`, in fp32 for the other kinds
        (planner/model/recipe.py).
        """
        if self.kernels.compiled:
            return self._compiled_norm(x, self.new(groups, 4, True, split=x.split))
        if self.kernels.fp32_norm and kind == "rms":
            kind = "rms-wide"
        wide = self.cast(x, 4)
        if x.grad:
            self.save(wide)
            self.save(self.new(groups, 4, True, split=x.split))  # autograd keeps rsqrt(variance)
        return self._weighted(self.like(wide), x, size, kind)

    def _compiled_norm(self, x: Value, moments: Value) -> Value:
        """Record a compiled norm on the tape and return its output.

        The norm keeps its input and `moments`, the statistics (such as 1 / standard deviation) of each token.
        """
        if x.grad or self.trainable:
            self._keep(x if x.instead is None else x.instead)
            self.save(moments)
        return self._fused(self.like(x, x.width, x.grad or self.trainable))

    def _weighted(self, normal: Value, x: Value, size: int, kind: str) -> Value:
        """Record the product of `normal` (the normalized `x`) and the norm's weight on the tape; return it."""
        trained = self.trainable
        weight = self.weight if trained else self.frozen
        if kind == "rms":
            narrow = self.cast(normal, x.width)
            if trained:
                self.save(narrow)
            return self.like(x, max(weight, x.width) if weight == 4 else x.width, x.grad or trained)
        if trained:
            self.save(normal)
        if x.grad and (kind == "rms-one" or (kind != "rms-wide" and weight != 4)):
            # autograd keeps the norm's fp32 scale: 1 + weight for kind `rms-one`, else the weight
            self.save(Value(Extent(fixed=size), 4, False))
        return self.cast(self.like(normal, 4, x.grad or trained), x.width)

    def layer_norm(self, x: Value, size: int, groups: int = 1, kind: str = "layer") -> Value:
        """Record a LayerNorm on the tape and return `x` after it.

        torch's fused kernel keeps the input, the mean and 1 / standard deviation for the backward pass.

        Autocast computes LayerNorm in fp32 on a GPU, but not on a CPU.
        """
        trained = self.trainable and kind != "layer-none"
        if self.kernels.compiled:
            return self._compiled_norm(x, self.new(2 * groups, 4, True, split=groups > 1 and x.split))
        if kind == "layer-written":
            wide = self.cast(x, 4)
            if x.grad:  # Autograd keeps x - mean twice: for the variance and for the product with rsqrt.
                self.save(self.like(wide))
                self.save(self.like(wide))
                self.save(self.new(groups, 4, True, split=x.split))
            return self._weighted(self.like(wide), x, size, kind)
        width = x.width
        if kind == "layer-none":
            x = self.cast(x, 4)
        elif self.autocast and self.cuda:
            x = self.cast(x, width := self.compute if kind == "layer-one" else 4)
        if x.grad or trained:
            weight = self.weight if trained else self.frozen
            self.save(x)
            moments = 4 if self.cuda else max(x.width, weight)
            self.save(self.new(2 * groups, moments, True, split=groups > 1 and x.split))
            if kind == "layer-one":  # The norm scales by 1 + weight; autocast on a GPU casts it and the bias.
                cast = self.autocast and self.cuda
                # autograd keeps the norm's scale, 1 + weight
                self.save(Value(Extent(fixed=size), self.compute if cast else weight, False))
                if cast and weight != self.compute:
                    self.save(Value(Extent(fixed=size), self.compute, False))  # autograd keeps the norm's bias
        return self.like(x, width, x.grad or trained)

    def activation(self, x: Value, kind: str) -> Value:
        """Record the activation function `kind` (a name of transformers' ACT2FN) and return its output.

        silu and gelu keep their input for the backward pass. Functions composed of several operations keep the
        tensors of each operation.
        """
        out = self.like(x)
        if not x.grad:
            return out
        if self.kernels.compiled:
            self._keep(x)
            return self._fused(out)
        if kind in ("relu", "tanh", "sigmoid"):
            self.save(out)
            return out
        # Autocast runs pow and expm1 in fp32 on a GPU and in the input's dtype on a CPU (torch 2.13,
        # autocast_mode.h; not measured on a GPU)
        wide = 4 if self.autocast and self.cuda else x.width
        if kind == "relu2":
            self.save(out)
            self.save(squared := self.cast(out, wide))
            return self.like(squared)
        if kind == "gelu_new":
            self.save(self.cast(x, wide))
            self.save(out)  # autograd keeps gelu_new's factor x / 2
            for _ in range(2):  # autograd keeps gelu_new's tanh and 1 + tanh
                self.save(self.like(x, wide))
            return self.like(x, wide)
        self.save(x)
        if kind == "xielu":
            learned = max(x.width, self.weight if self.trainable else self.frozen)
            self.save(self.like(x, learned))  # autograd keeps xIELU's product alpha_p x
            self.save(self.like(x, wide))  # autograd keeps xIELU's expm1(x)
            if self.trainable:
                self.save(self.like(x, wide))  # autograd keeps xIELU's expm1(x) - x
            self.save(self.like(x, 1))  # autograd keeps xIELU's mask x > 0
            return self.like(x, max(learned, wide))
        for _ in range(WRITTEN_OUT.get(kind, 0)):
            self.save(self.like(x))
        return out

    def multiply(self, a: Value, b: Value, shape: Value | None = None) -> Value:
        """Record `a` * `b` on the tape and return it. `shape`: the larger factor, if the other is broadcast."""
        if a.grad:
            self._keep(b)
        if b.grad:
            self._keep(a)
        return self._fused(self.like(shape or a, max(a.width, b.width), a.grad or b.grad))

    def grouped(
        self, x: Value, weights: Value, count: int, chosen: int, hidden: int, inner: int, act: str, biased: bool
    ) -> Value:
        """Record gated experts, computed by torch's grouped_mm, on the tape and return their output.

        grouped_mm runs in the dtype of the weights, because autocast does not cast its operands.
        """
        if biased and self.trainable:
            self.save(self.new(chosen, 8, False))  # autograd keeps the expert indices that select the biases
        width = self.weight if self.trainable else self.frozen
        grad = x.grad or self.trainable
        # Tokens are sorted by expert. Autograd keeps three int64 indices per (token, expert) pair: the sort's
        # permutation, its inverse, and the token.
        for _ in range(3):
            self.save(self.new(chosen, 8, False))
        taken = self.new(chosen * hidden, width, x.grad)
        if grad:
            self.save(Value(Extent(fixed=count), 4, False))  # autograd keeps the experts' end offsets
        if self.trainable:
            self.save(taken)
        both = self.new(2 * chosen * inner, width, grad, split=True)
        gate, up = self.view(both, chosen * inner), self.view(both, chosen * inner)
        product = self._clamped(gate, up) if act == CLAMPED else self.multiply(self.activation(gate, act), up)
        if self.trainable:
            self.save(product)
        out = self.new(chosen * hidden, width, grad)
        self.multiply(out, self.like(weights))
        return self.new(hidden, x.width, grad or weights.grad)

    def _clamped(self, gate: Value, up: Value) -> Value:
        """Record the clamped activation of gpt-oss's experts and return its output.

        For the projections gate and up, it is (min(max(up, -c), c) + 1) g sigmoid(a g), with g = min(gate, c)
        and constants a and c.
        """
        if gate.grad:
            self.save(gate)
            for _ in range(4):  # autograd keeps the clamped gate g, sigmoid(a g), their product and up + 1
                self.save(self.like(gate))
        return self.like(up)

    def dropout(self, x: Value, probability: float) -> Value:
        """Record dropout, which keeps a mask for the backward pass, and return `x` after it."""
        if probability and x.grad:
            self.save(self.like(x, 1 if self.cuda else x.width))
        return self.like(x) if probability else x

    def rotate(self, x: Value, tables: tuple[Value, Value]) -> Value:
        """Record the rotary embedding, which keeps only its cos and sin tables, and return `x` after it."""
        if self.kernels.tables != "shared":
            if x.grad and self.kernels.tables == "taken":
                self.save(
                    Value(Extent(token=tables[0].size.position), 4, False)
                )  # cos and sin, with dim / 2 values each per token
            return self.like(x)
        if x.grad:
            for table in tables:
                self.save(table)
        return self.like(x, max(x.width, tables[0].width))

    def attend(
        self, q: Value, k: Value, v: Value, heads: int, kv_heads: int, head: int, *,
        masked: bool = False, broadcast: bool = False, softcap: bool = False, dropout: float = 0.0,
        softmax: int = 4, upcast: bool = False, sinks: bool = False, heads_first: bool = False,
        value: int | None = None,
    ) -> Value:  # fmt: skip
        """Record attention over `heads` query heads and return its output [b, s, heads x value].

        Args:
            q: queries.
            k: keys.
            v: values.
            heads: query heads.
            kv_heads: KV heads.
            head: head size of queries and keys.
            masked: whether an explicit mask is passed (sliding windows, packed batches). With a mask, SDPA
                repeats KV heads.
            broadcast: whether SDPA broadcasts KV heads by single operations in fp32.
            softcap: whether scores have a soft cap.
            dropout: probability of dropout.
            softmax: bytes of one value of the softmax result under eager attention.
            upcast: whether eager attention computes scores in fp32.
            sinks: whether each head has an attention sink.
            heads_first: whether q is stored as [b, heads, s, head]. The output then has the same layout and is
                copied before the output projection.
            value: head size of values, None for `head`.
        """
        width = self.compute if self.autocast else q.width
        sizes = heads * head, heads * (head if value is None else value)
        # A single KV head of a single sequence is repeated by expand(), which makes no copy.
        repeat = kv_heads != heads and not (self.single and kv_heads == 1)
        if self.attention == "eager":
            if upcast or sinks:
                width = self.compute if self.autocast else v.width
            if upcast:
                q, k = self.cast(q, 4), self.cast(k, 4)
            return self._eager(
                q, k, v, heads, sizes, repeat, softcap, dropout, softmax, width, upcast=upcast,
                sinks=sinks,
            )  # fmt: skip
        if broadcast and kv_heads != heads and self.attention == "sdpa":
            # For broadcast KV heads, SDPA runs its math kernel, which repeats K and V and computes in fp32.
            q = self.new(heads * head, 4, q.grad, split=True)
            k, v = self._repeated(k, v, sizes) if repeat else (self.like(k), v)
            k, v = self.cast(k, 4), self.cast(v, 4)
            return self._eager(q, k, v, heads, sizes, False, False, 0.0, 4, width=4, out=width)
        explicit = self.attention != "flash" and (masked or self.explicit_mask)
        if repeat and (explicit or self.kernels.repeats_kv):
            k, v = self._repeated(k, v, sizes)
        q, k, v = (self.cast(t, width) for t in (q, k, v))
        grad = q.grad or k.grad or v.grad
        out = self.new(sizes[1], width, grad, split=True)
        if grad:
            for tensor in (q, k, v, out):
                self.save(tensor)
            self.save(self.new(heads, 4, True, split=True))  # the attention kernel keeps log-sum-exp
            if explicit:
                # SDPA turns the boolean mask into an additive mask of the queries' dtype, and every layer keeps
                # it.
                self.save(Value(Extent(mask=1), width, False))
        return self.like(out) if heads_first else out

    def _operand(self, x: Value) -> Value:
        """Return the operand that torch.bmm reads: `x`, or a copy of `x` if batch and heads do not merge."""
        return x if self.single else self.like(x)

    def _repeated(self, k: Value, v: Value, sizes: tuple[int, int]) -> tuple[Value, Value]:
        """Return symbolic copies of K and V, with the KV heads repeated for every query head."""
        return (
            self.new(sizes[0], k.width, k.grad, split=True),
            self.new(sizes[1], v.width, v.grad, split=True),
        )

    def _eager(
        self, q: Value, k: Value, v: Value, heads: int, sizes: tuple[int, int], repeat: bool, softcap: bool,
        dropout: float, softmax: int, width: int, out: int | None = None, upcast: bool = False,
        sinks: bool = False,
    ) -> Value:  # fmt: skip
        """Record eager attention, whose operations each keep a score matrix, and return its output."""
        if repeat:
            k, v = self._repeated(k, v, sizes)
        given = v.width if upcast or sinks else q.width
        if self.autocast or not upcast:
            q, k = self.cast(q, width), self.cast(k, width)
        v = self.cast(v, width)
        grad = q.grad or k.grad

        def scores(size: int, needs: bool) -> Value:
            """Return a symbolic tensor with one attention score of `size` bytes per head and pair of tokens."""
            return Value(Extent(score=heads), size, needs, True)

        if k.grad:
            self.save(self._operand(q))
        if q.grad:
            self.save(self._operand(k))
        if grad:
            if softcap:
                self.save(scores(width, True))  # The soft cap's tanh keeps its result.
            weights = scores(softmax, True)
            kept = weights
            if sinks:  # A sink adds one score per query; autograd keeps the index of the largest score.
                kept = Value(Extent(score=heads, token=heads), softmax, True, True)
                self.save(self.new(heads, 8, False, split=True))
                weights.base = kept
            self.save(kept)  # Softmax keeps its result for the backward pass.
        else:
            weights = scores(width, False)
        weights = self.cast(weights, given)
        if dropout and grad:
            self.save(self.like(weights, 1 if self.cuda else given))
            weights = self.like(weights)
        weights = self.cast(weights, width)
        if v.grad:
            self.save(weights)
        if grad:
            self.save(self._operand(v))
        return self.new(sizes[1], out or width, grad or v.grad, split=True)
