"""Activations a training step keeps for its backward pass, layer by layer, from the architecture.

Each family's layer is written as the operations of its module (transformers 5.19, models/*/modeling_*.py)
on a :class:`Tape`. A family without such a program is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from tonnage.planner.architecture import Architecture
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.records import dataclass
from tonnage.planner.training.precision import Convention
from tonnage.planner.training.tape import Size, Tape, Value


@dataclass(frozen=True, slots=True)
class Block:
    """What a layer program needs to know beside the shapes: the config's switches."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    rotary: int  # rotated dimensions of a head
    act: str
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    softcap: bool = False
    logit_softcap: bool = False
    qk_norm: bool = False
    parallel: bool = False
    new_decoder: bool = False
    norms: int = 2
    positions: bool = False  # learned


class LayerKind(NamedTuple):
    """Layers that keep the same: ``masked`` (given an explicit mask), whether their input needs a gradient,
    whether they are trained."""

    masked: bool
    input_grad: bool
    trainable: bool


class Kept(NamedTuple):
    """Bytes one layer (or the embedding, the head) keeps. ``split``: the part tensor parallelism divides;
    ``scores``: the part that is attention scores (recomputed by selective checkpointing). ``casts``: bytes
    of 16-bit copies of its weights the backward pass reads (of trained weights, of frozen ones)."""

    total: Size
    split: Size
    scores: Size
    attention: Size
    mlp: Size
    casts: int
    frozen_casts: int
    pieces: tuple[Size, ...] = ()  # bytes of each tensor, for the allocator's rounding


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: it is the key of a cache
class Activations:
    """``layers``: (kind, how many of the model's layers, what each keeps) and the parts around them.

    ``stream``: bytes per token of the residual stream, what full checkpointing keeps of a layer.
    ``logit``: bytes per token of one 16-bit or 32-bit copy of the logits; ``loss``: what the loss keeps.
    """

    layers: tuple[tuple[LayerKind, int, Kept], ...]
    shared: Size  # rotary tables, ids
    embedding: Kept
    head: Kept
    loss: Size
    stream: int
    logit: int
    logit_width: int
    vocab: int
    hidden: int


def _norm(t: Tape, b: Block, x: Value, *, gemma: bool = False) -> Value:
    return t.rms_norm(x, b.hidden, gemma=gemma)


def _qkv_rope(t: Tape, b: Block, h: Value, tables: tuple[Value, Value], at: str, gemma: bool) -> Value:
    """Separate q, k, v projections, optional norms on q and k, rotary, attention."""
    q = t.linear(h, f"{at}.q_proj", b.hidden, b.heads * b.head)
    k = t.linear(h, f"{at}.k_proj", b.hidden, b.kv_heads * b.head)
    v = t.linear(h, f"{at}.v_proj", b.hidden, b.kv_heads * b.head)
    if b.qk_norm:
        q = t.rms_norm(q, b.head, groups=b.heads, gemma=gemma)
        k = t.rms_norm(k, b.head, groups=b.kv_heads, gemma=gemma)
    q, k = t.rotate(q, tables), t.rotate(k, tables)
    return t.attend(
        q, k, v, b.heads, b.kv_heads, b.head, masked=t.masked, softcap=b.softcap, dropout=b.attention_dropout
    )


def _gated_mlp(t: Tape, b: Block, h: Value, at: str) -> Value:
    t.label = "mlp"
    gate = t.linear(h, f"{at}.gate_proj", b.hidden, b.inner)
    up = t.linear(h, f"{at}.up_proj", b.hidden, b.inner)
    product = t.multiply(t.activation(gate, b.act), up)
    return t.linear(product, f"{at}.down_proj", b.inner, b.hidden, column=False)


def _add(t: Tape, a: Value, residual: Value) -> Value:
    """Residual sum: keeps nothing; a new tensor of the wider type."""
    return Value(residual.size, max(a.width, residual.width), a.grad or residual.grad)


def _llama(t: Tape, b: Block, x: Value, tables: tuple[Value, Value]) -> Value:
    t.label = "attention"
    h = _norm(t, b, x)
    out = _qkv_rope(t, b, h, tables, "model.layers.*.self_attn", False)
    out = t.linear(out, "model.layers.*.self_attn.o_proj", b.heads * b.head, b.hidden, column=False)
    x = _add(t, out, x)
    t.label = "mlp"
    h = _norm(t, b, x)
    return _add(t, _gated_mlp(t, b, h, "model.layers.*.mlp"), x)


def _gemma(t: Tape, b: Block, x: Value, tables: tuple[Value, Value]) -> Value:
    t.label = "attention"
    h = _norm(t, b, x, gemma=True)
    out = _qkv_rope(t, b, h, tables, "model.layers.*.self_attn", True)
    out = t.linear(out, "model.layers.*.self_attn.o_proj", b.heads * b.head, b.hidden, column=False)
    if b.norms == 4:
        out = _norm(t, b, out, gemma=True)
    x = _add(t, out, x)
    t.label = "mlp"
    h = _norm(t, b, x, gemma=True)
    out = _gated_mlp(t, b, h, "model.layers.*.mlp")
    if b.norms == 4:
        out = _norm(t, b, out, gemma=True)
    return _add(t, out, x)


def _plain_mlp(t: Tape, b: Block, h: Value, up: str, down: str) -> Value:
    t.label = "mlp"
    mid = t.activation(t.linear(h, up, b.hidden, b.inner), b.act)
    return t.linear(mid, down, b.inner, b.hidden, column=False)


def _gpt_neox(t: Tape, b: Block, x: Value, tables: tuple[Value, Value]) -> Value:
    at = "gpt_neox.layers.*"
    t.label = "attention"
    h = t.layer_norm(x)
    qkv = t.linear(h, f"{at}.attention.query_key_value", b.hidden, 3 * b.hidden)
    q, k, v = (t.view(qkv, b.hidden) for _ in range(3))
    q, k = (t.like(t.rotate(part, tables)) for part in (q, k))  # concatenated with the unrotated rest
    out = t.attend(
        q, k, v, b.heads, b.heads, b.head, masked=t.masked, dropout=b.attention_dropout, heads_first=True
    )
    out = t.linear(out, f"{at}.attention.dense", b.hidden, b.hidden, column=False)
    out = t.dropout(out, b.hidden_dropout)
    if not b.parallel:
        x = _add(t, out, x)
    t.label = "mlp"
    h = t.layer_norm(x)
    mlp = _plain_mlp(t, b, h, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h")
    return _add(t, t.dropout(mlp, b.hidden_dropout), x)


def _falcon(t: Tape, b: Block, x: Value, tables: tuple[Value, Value]) -> Value:
    at = "transformer.h.*"
    t.label = "attention"
    h = t.layer_norm(x)
    mlp_in = t.layer_norm(x) if b.norms == 2 and b.parallel else h
    fused = (b.heads + 2 * b.kv_heads) * b.head
    qkv = t.linear(h, f"{at}.self_attention.query_key_value", b.hidden, fused)
    # heads are split by copies; new_decoder repeats K and V to all heads first
    kv = b.heads if b.new_decoder else b.kv_heads
    q = t.like(qkv)
    q.size = Size(token=b.heads * b.head)
    k, v = (Value(Size(token=kv * b.head), qkv.width, qkv.grad, True) for _ in range(2))
    if b.rotary:
        q, k = t.rotate(q, tables), t.rotate(k, tables)
    # FalconModel always passes a mask, also where none is needed
    out = t.attend(q, k, v, b.heads, kv, b.head, masked=True, softmax=h.width)
    out = t.linear(out, f"{at}.self_attention.dense", b.hidden, b.hidden, column=False)
    if not b.parallel:
        x = _add(t, t.dropout(out, b.attention_dropout), x)
        t.label = "mlp"
        mlp_in = t.layer_norm(x)
    mlp = _plain_mlp(t, b, mlp_in, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h")
    return _add(t, t.dropout(mlp, b.hidden_dropout), x)


def _gpt_bigcode(t: Tape, b: Block, x: Value, tables: tuple[Value, Value]) -> Value:
    at = "transformer.h.*"
    t.label = "attention"
    h = t.layer_norm(x)
    fused = (b.heads + 2 * b.kv_heads) * b.head
    qkv = t.linear(h, f"{at}.attn.c_attn", b.hidden, fused)
    q, k, v = t.view(qkv, b.heads * b.head), t.view(qkv, b.kv_heads * b.head), t.view(qkv, b.kv_heads * b.head)
    out = t.attend(q, k, v, b.heads, b.kv_heads, b.head, masked=t.masked, dropout=b.attention_dropout)
    out = t.linear(out, f"{at}.attn.c_proj", b.hidden, b.hidden, column=False)
    x = _add(t, t.dropout(out, b.hidden_dropout), x)
    t.label = "mlp"
    h = t.layer_norm(x)
    mlp = _plain_mlp(t, b, h, f"{at}.mlp.c_fc", f"{at}.mlp.c_proj")
    return _add(t, t.dropout(mlp, b.hidden_dropout), x)


_LAYERS: dict[str, Callable[[Tape, Block, Value, tuple[Value, Value]], Value]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _gemma),
    "gpt_neox": _gpt_neox,
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), _falcon),
    "gpt_bigcode": _gpt_bigcode,
}


class ShapeSum(NamedTuple):
    """``layers`` equal layers: elements per token of all linear layers' inputs and outputs (routed experts: of
    those one token goes through), of the norms, and the weights of the matrices."""

    layers: int
    linear: int
    norms: int
    weights: int


# tests/planner/test_training_activations.py: over the ten families with a program, full training in fp32, bf16
# and under autocast, the estimate is 0.72 to 1.99 of the exact figure.
ESTIMATE_LOW, ESTIMATE_HIGH = 0.5, 1.4


def shape_sums(architecture: Architecture) -> tuple[ShapeSum, ...]:
    """What a decoder's layers would keep if each linear layer kept its input and its output."""
    sums: dict[int, list[int]] = {}
    for tensor in architecture.tensors:
        if tensor.layer is None or tensor.role in ("vision", "audio", "projector", "buffer"):
            continue
        linear, norms, weights = sums.setdefault(tensor.layer, [0, 0, 0])
        weights += tensor.elements if len(tensor.shape) > 1 else 0
        if tensor.role == "norm":
            norms += tensor.shape[0] if tensor.shape else 0
        elif tensor.role == "expert" and len(tensor.shape) == 3:
            linear += (tensor.shape[1] + tensor.shape[2]) * max(1, architecture.experts_per_token)
        elif len(tensor.shape) == 2:
            linear += sum(tensor.shape)
        sums[tensor.layer] = [linear, norms, weights]
    counts: dict[tuple[int, ...], int] = {}
    for values in sums.values():
        counts[tuple(values)] = counts.get(tuple(values), 0) + 1
    return tuple(ShapeSum(count, values[0], values[1], values[2]) for values, count in counts.items())


def known_families() -> tuple[str, ...]:
    return tuple(_LAYERS)


def block_of(architecture: Architecture, config: Mapping[str, Any]) -> Block:
    """The switches of the family; absent fields have the config class's default (transformers 5.19)."""
    kind = architecture.model_type

    def number(*names: str, default: float = 0.0) -> float:
        for name in names:
            value = config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return default

    act = config.get("hidden_activation") if kind.startswith("gemma") else None
    act = act or config.get("hidden_act") or config.get("activation") or config.get("activation_function")
    default = {"gpt_neox": "gelu", "falcon": "gelu", "RefinedWeb": "gelu", "RefinedWebModel": "gelu"}
    if kind.startswith("gemma"):
        act = act or "gelu_pytorch_tanh"
    norm_names = {
        t.name.rpartition(".")[0].rpartition(".")[2]
        for t in architecture.tensors
        if t.role == "norm" and t.layer == 0
    }
    big = kind == "gpt_bigcode"
    new_decoder = bool(config.get("new_decoder_architecture", kind == "RefinedWeb"))
    parallel = (
        bool(config.get("use_parallel_residual", True))
        if kind == "gpt_neox"
        else bool(config.get("parallel_attn", True))
    )
    return Block(
        hidden=architecture.hidden_size,
        inner=architecture.intermediate_size,
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head=architecture.head_size,
        vocab=architecture.vocab_size,
        rotary=architecture.rotary.dim if architecture.rotary else 0,
        act=str(act or default.get(kind, "silu")),
        attention_dropout=number("attn_pdrop", default=0.1) if big else number("attention_dropout"),
        hidden_dropout=number("resid_pdrop", default=0.1) if big else number("hidden_dropout"),
        embedding_dropout=number("embd_pdrop", default=0.1) if big else 0.0,
        softcap=kind == "gemma2" and config.get("attn_logit_softcapping", 50.0) is not None,
        logit_softcap=kind in ("gemma2",) and config.get("final_logit_softcapping", 30.0) is not None,
        qk_norm="q_norm" in norm_names,
        parallel=parallel or new_decoder,
        new_decoder=new_decoder,
        norms=len(norm_names - {"q_norm", "k_norm"}),
        positions=big,
    )  # fmt: skip


@lru_cache(maxsize=512)
def activations_of(
    family: str,
    block: Block,
    layers: int,
    masked: tuple[bool, ...],
    convention: Convention,
    frozen: int,
    key: tuple[str, str, int, frozenset[str], int, bool],
    cuda: bool = True,
    explicit_mask: bool = False,
    estimated: tuple[ShapeSum, ...] = (),
) -> Activations:
    """Symbolic activations of a model. ``key``: attention implementation, method, adapter rank, target
    modules, trained layers (freeze), fp8. A family without a program is estimated from ``estimated``; without
    that UnsupportedArchitecture is raised."""
    attention, method, rank, targets, trained_layers, fp8 = key
    program = _LAYERS.get(family)
    if program is None and not estimated:
        raise UnsupportedArchitecture(
            f"{family!r}: its activations are not known here",
            field="model_type",
            hint="known: " + ", ".join(_LAYERS) + "; --activations none leaves them out",
        )
    width = convention.weights if method == "full" else frozen
    stream = 4 if convention.autocast and width == 4 else (2 if width == 2 else convention.compute)
    if convention.name == "fp32":
        stream = 4

    def tape(trainable: bool, masked: bool) -> Tape:
        return Tape(
            compute=convention.compute, autocast=convention.autocast,
            weight=convention.weights if convention.autocast else stream,
            frozen=frozen if convention.autocast else stream, attention=attention, cuda=cuda,
            explicit_mask=explicit_mask, targets=targets, method=method, rank=rank, fp8=fp8,
            trainable=trainable, masked=masked,
        )  # fmt: skip

    table = [Value(Size(position=block.rotary), stream, False) for _ in range(2)]
    tables = (table[0], table[1])
    kinds: dict[LayerKind, int] = {}
    embedded = method == "full"
    for index in range(layers):
        trainable = method == "full" or (method == "freeze" and index >= layers - trained_layers)
        below = embedded or (index > 0 and method in ("lora", "qlora", "ia3"))
        below = below or (method == "freeze" and index > layers - trained_layers)
        kind = LayerKind(masked[index], below, trainable)
        kinds[kind] = kinds.get(kind, 0) + 1
    out = []
    for found in estimated:
        size = found.linear * convention.compute + found.norms * (4 + convention.compute)
        score = block.heads * (4 + convention.compute) if attention == "eager" else 0
        total, scores = Size(token=size, score=score), Size(score=score)
        casts = convention.compute * found.weights if fp8 or (convention.autocast and width == 4) else 0
        kept = Kept(total, total, scores, total, Size(), casts, 0)
        out.append((LayerKind(False, True, True), found.layers, kept))
    for kind, count in kinds.items() if program else ():
        t = tape(kind.trainable, kind.masked)
        x = Value(Size(token=block.hidden), stream, kind.input_grad)
        assert program is not None
        program(t, block, x, tables)
        for one in tables:  # shared by all layers, counted once below
            t.saved.pop(id(one), None)
        out.append((kind, count, _kept(t)))
    shared = Size(position=2 * block.rotary * stream)
    return Activations(
        layers=tuple(out),
        shared=shared,
        embedding=_embedding(tape(method == "full", False), block, stream),
        head=_head(tape(method == "full", False), family, block, stream),
        loss=_loss(block, method),
        stream=block.hidden * stream,
        logit=block.vocab,
        logit_width=convention.compute if convention.autocast else stream,
        vocab=block.vocab,
        hidden=block.hidden,
    )


def _kept(t: Tape) -> Kept:
    scores = Size(score=sum(s.value.size.score * s.value.width for s in t.saved.values()))
    return Kept(
        t.total(), t.total(split=True), scores, t.total("attention"), t.total("mlp"),
        sum(size for _, size, frozen in t.weight_casts if not frozen),
        sum(size for _, size, frozen in t.weight_casts if frozen),
        tuple(s.value.size.times(s.value.width) for s in t.saved.values()),
    )  # fmt: skip


def _embedding(t: Tape, b: Block, stream: int) -> Kept:
    """Token ids are kept (8 bytes each); learned positions keep theirs, dropout its mask."""
    t.label = "embedding"
    if t.method == "full":
        t.save(Value(Size(token=1), 8, False))
        if b.positions:
            t.save(Value(Size(position=1), 8, False))
        t.dropout(Value(Size(token=b.hidden), stream, True), b.embedding_dropout)
    return _kept(t)


def _head(t: Tape, family: str, b: Block, stream: int) -> Kept:
    """Final norm, head and the soft cap of the logits."""
    t.label = "head"
    x = Value(Size(token=b.hidden), stream, True)
    if family in ("gpt_neox", "gpt_bigcode") or family.startswith(("falcon", "Refined")):
        h = t.layer_norm(x)
    else:
        h = _norm(t, b, x, gemma=family.startswith("gemma"))
    logits = t.linear(h, "lm_head", b.hidden, b.vocab)
    if b.logit_softcap:
        t.save(t.like(logits))
    return _kept(t)


def _loss(b: Block, method: str) -> Size:
    """log_softmax keeps its fp32 result, the loss the shifted labels."""
    return Size(token=4 * b.vocab + 8, fixed=4)
