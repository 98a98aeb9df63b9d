"""The tensors of a model, named as in transformers' state dict.

``Tensors`` has methods that add the tensors of one module each. ``tensors_of`` returns all tensors of a model
that a recipe (model/recipe.py) describes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.model.recipe import Attention, Experts, Heads, LatentAttention, Mlp, Norm, Recipe
from tonnage.planner.model.tensor import Role, TensorSpec

Shard = Literal["column", "row"] | None

# Maximum number of tensors, which protects the planner from configs that multiply sizes. DeepSeek-V4-Pro has
# the most tensors of all published models, 2,201; with 1,000 layers (the limit in planner/model/fields.py) it
# would have 36,000. A TensorSpec takes 300 bytes of memory and 10 us of planning time.
MAX_TENSORS = 60_000

# Kind of norm in a recipe -> ``kind`` argument of Tensors.norm; all other kinds have only a weight
_LEARNED = {"layer": "layer", "layer-one": "layer", "layer-weight": "layer-weight",
            "layer-written": "layer-weight", "layer-none": "none"}  # fmt: skip


class Tensors:
    """A growing list of a model's tensors, with methods that add the tensors of one module each.

    Attributes:
        specs: the tensors so far.
        layer: model layer of the tensors added next, None outside the layers.
        role: if set, role of every tensor added except buffers, such as ``vision`` while a tower is added.
        linear_class: class name of linear layers.
    """

    def __init__(self, role: Role | None = None) -> None:
        """Create an empty list; ``role`` is the role of the tensors added first, such as ``vision``."""
        self.specs: list[TensorSpec] = []
        self.layer: int | None = None
        self.role = role
        self.linear_class = "Linear"

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        role: Role,
        module_class: str,
        *,
        shard: int | None = None,
        kv: tuple[int, int] = (0, 0),
        dtype: str | None = None,
        tied_to: str | None = None,
        matrices: int = 1,
        transposed: bool = False,
        stored: str | None = None,
    ) -> None:
        """Add one tensor named ``name`` to the model's list of tensors.

        ``shard`` is the dimension that tensor parallelism divides, None for no division. If this dimension
        contains KV heads, ``kv`` is (number of rows that belong to KV heads, number of KV heads).
        """
        if len(self.specs) >= MAX_TENSORS:
            raise UnsupportedArchitecture(f"the config gives more than {MAX_TENSORS:,} tensors", field=name)
        if self.role is not None and role != "buffer":
            role = self.role
        self.specs.append(
            TensorSpec(
                name,
                shape,
                role,
                module_class,
                self.layer,
                tied_to,
                dtype,
                shard,
                *kv,
                matrices,
                transposed,
                stored,
            )
        )

    def linear(
        self,
        module: str,
        out: int,
        into: int,
        role: Role = "attention",
        *,
        bias: bool = False,
        shard: Shard = None,
        kv: tuple[int, int] = (0, 0),
        module_class: str | None = None,
        dtype: str | None = None,
        stored: str | None = None,
    ) -> None:
        """Add the weight [out, into] of a linear layer and, with ``bias``, its bias [out].

        ``shard`` is what tensor parallelism divides: ``column`` for the outputs, ``row`` for the inputs, or
        None.
        """
        if out < 1 or into < 1:  # Some sizes are quotients of config values, which may round down to 0.
            raise ConfigError(
                f"the config gives it the shape [{out}, {into}], whose sizes must be positive",
                field=f"{module}.weight",
            )
        dim = {"column": 0, "row": 1, None: None}[shard]
        module_class = module_class or self.linear_class
        shape, across = (out, into), dim
        if module_class == "Conv1D":  # GPT-2's Conv1D stores [in, out]; quantizers transpose the matrix
            shape, across = (into, out), None if dim is None else 1 - dim
        self.add(f"{module}.weight", shape, role, module_class, shard=across, kv=kv, dtype=dtype, stored=stored)
        if bias:
            self.add(f"{module}.bias", (out,), role, module_class, shard=0 if dim == 0 else None, kv=kv)

    def norm(self, module: str, size: int, kind: str = "rms") -> None:
        """Add the parameters of the norm ``module`` over ``size`` values.

        The kinds ``rms`` and ``layer-weight`` (LayerNorm without bias) have a weight, ``layer`` has a weight
        and a bias, and ``none`` has no parameters.
        """
        if kind == "none":
            return
        module_class = "RMSNorm" if kind == "rms" else "LayerNorm"
        self.add(f"{module}.weight", (size,), "norm", module_class)
        if kind == "layer":
            self.add(f"{module}.bias", (size,), "norm", module_class)

    def embedding(
        self, module: str, rows: int, width: int, tied_to: str | None = None, shard: int | None = None
    ) -> None:
        """Add an embedding table [rows, width].

        ``shard`` is 0 for a vocabulary, because tensor parallelism divides its rows. It is None for positions.
        """
        self.add(f"{module}.weight", (rows, width), "embedding", "Embedding", tied_to=tied_to, shard=shard)

    def vocabulary(self, module: str, rows: int, width: int, tied_to: str | None = None) -> None:
        """Add the embedding table of a vocabulary, whose rows tensor parallelism divides."""
        self.embedding(module, rows, width, tied_to, 0)

    def head(self, module: str, vocab: int, width: int, tied_to: str | None, bias: bool = False) -> None:
        """Add the matrix [vocab, width] of the language model's head and, with ``bias``, its bias."""
        self.add(f"{module}.weight", (vocab, width), "head", "Linear", tied_to=tied_to, shard=0)
        if bias:
            self.add(f"{module}.bias", (vocab,), "head", "Linear", shard=0)

    def layers(self, count: int, prefix: str) -> Iterator[tuple[int, str]]:
        """Yield (index, ``prefix``.index) of each layer.

        Tensors that the caller adds in the body of the loop belong to that layer.
        """
        for self.layer in range(count):
            yield self.layer, f"{prefix}.{self.layer}"
        self.layer = None

    def norms(self, at: str, size: int, *names: str, kind: str = "rms") -> None:
        """Add the parameters of the norms ``names``, each over ``size`` values, below module ``at``."""
        for name in names:
            self.norm(f"{at}.{name}", size, kind)

    def layer_norms(self, at: str, size: int, kind: str = "rms") -> None:
        """Add a layer's two norms, one before attention and one before the MLP, below module ``at``."""
        self.norms(at, size, "input_layernorm", "post_attention_layernorm", kind=kind)

    def close(self, norm: str, embedding: str, vocab: int, width: int, tied: bool) -> None:
        """Add the model's final norm and its output head, which may be tied to the table ``embedding``."""
        self.layer = None
        self.norm(norm, width)
        self.head("lm_head", vocab, width, f"{embedding}.weight" if tied else None)

    def buffer(
        self, name: str, shape: tuple[int, ...], module_class: str, dtype: str | None, stored: str | None = None
    ) -> None:
        """Add a buffer (a tensor that is not trained) to the model's list of tensors.

        ``stored`` is the buffer's dtype in a checkpoint, None if checkpoints do not contain it.
        """
        self.add(name, shape, "buffer", module_class, dtype=dtype, stored=stored)

    def attention(
        self,
        at: str,
        dims: Heads,
        *,
        bias: bool = False,
        out_bias: bool = False,
        out: str = "o_proj",
        qk_norm: str = "none",
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
        gated: bool = False,
    ) -> None:
        """Add separate q, k, v and output projections under ``at``, and norms of q and k.

        ``qk_norm`` is ``head`` (one weight of head size), ``full`` (a weight over all heads) or ``none``. With
        ``gated``, the q projection has twice the rows, because it also computes a gate of the output.
        """
        kv_rows, value_rows = dims.kv_heads * dims.head_size, dims.kv_heads * dims.value_size
        for name, rows, kv in (
            ("q_proj", dims.heads * dims.head_size * (2 if gated else 1), (0, 0)),
            ("k_proj", kv_rows, (kv_rows, dims.kv_heads)),
            ("v_proj", value_rows, (value_rows, dims.kv_heads)),
        ):
            self.linear(f"{at}.{name}", rows, dims.hidden, bias=bias, shard="column", kv=kv)
        self.linear(f"{at}.{out}", dims.hidden, dims.heads * dims.value_size, bias=out_bias, shard="row")
        if qk_norm != "none":
            full = qk_norm == "full"
            q_norm, k_norm = norm_names
            self.norm(f"{at}.{q_norm}", dims.heads * dims.head_size if full else dims.head_size)
            self.norm(f"{at}.{k_norm}", kv_rows if full else dims.head_size)

    def fused_attention(
        self, at: str, dims: Heads, *, qkv: str, out: str, bias: bool = False, out_bias: bool = False
    ) -> None:
        """Add one projection for q, k and v and the output projection under ``at``."""
        kv_rows = dims.kv_heads * (dims.head_size + dims.value_size)
        rows = dims.heads * dims.head_size + kv_rows
        kv = (kv_rows, dims.kv_heads)
        self.linear(f"{at}.{qkv}", rows, dims.hidden, bias=bias, shard="column", kv=kv)
        self.linear(f"{at}.{out}", dims.hidden, dims.heads * dims.value_size, bias=out_bias, shard="row")

    def gated_mlp(
        self,
        at: str,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        role: Role = "mlp",
    ) -> None:
        """Add an MLP of three matrices: gate, up and down."""
        gate, up, down = names
        self.linear(f"{at}.{gate}", inner, hidden, role, bias=bias, shard="column")
        self.linear(f"{at}.{up}", inner, hidden, role, bias=bias, shard="column")
        self.linear(f"{at}.{down}", hidden, inner, role, bias=bias, shard="row")

    def plain_mlp(
        self,
        at: str,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        names: tuple[str, str] = ("up_proj", "down_proj"),
        fused_gate: bool = False,
    ) -> None:
        """Add an MLP of two matrices, up and down.

        With ``fused_gate`` the first matrix holds both gate and up.
        """
        up, down = names
        self.linear(f"{at}.{up}", inner * (2 if fused_gate else 1), hidden, "mlp", bias=bias, shard="column")
        self.linear(f"{at}.{down}", hidden, inner, "mlp", bias=bias, shard="row")

    def connector(
        self, at: str, into: int, middle: int, out: int, *, bias: bool = True,
        names: tuple[str, str] = ("linear_1", "linear_2"),
    ) -> None:  # fmt: skip
        """Add two linear layers below module ``at``: [middle, into], then [out, middle]."""
        first, second = names
        self.linear(f"{at}.{first}", middle, into, bias=bias)
        self.linear(f"{at}.{second}", out, middle, bias=bias)

    def experts(
        self,
        at: str,
        count: int,
        hidden: int,
        inner: int,
        *,
        gated: bool = True,
        transposed: bool = False,
        bias: bool = False,
        names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    ) -> None:
        """Add all routed experts of a layer as two tensors [experts, out, in].

        With ``transposed`` they are [experts, in, out].
        """
        up, down = names
        matrices = 2 if gated else 1
        rows = matrices * inner
        up_shape = (count, hidden, rows) if transposed else (count, rows, hidden)
        down_shape = (count, inner, hidden) if transposed else (count, hidden, inner)
        rows_at, columns_at = (2, 1) if transposed else (1, 2)
        self.add(
            f"{at}.{up}", up_shape, "expert", "Experts", shard=rows_at, matrices=matrices, transposed=transposed
        )
        if bias:
            self.add(f"{at}.{up}_bias", (count, rows), "expert", "Experts", shard=1)
        self.add(f"{at}.{down}", down_shape, "expert", "Experts", shard=columns_at, transposed=transposed)
        if bias:
            self.add(f"{at}.{down}_bias", (count, hidden), "expert", "Experts")

    def router(
        self,
        module: str,
        count: int,
        hidden: int,
        *,
        linear: bool = False,
        bias: bool = False,
        dtype: str | None = None,
        stored: str | None = None,
    ) -> None:
        """Add the router's matrix [experts, hidden].

        With ``linear`` the router is an nn.Linear, which bitsandbytes replaces.
        """
        kind = "Linear" if linear else "Router"
        self.linear(module, count, hidden, "router", bias=bias, module_class=kind, dtype=dtype, stored=stored)

    def correction_bias(self, name: str, shape: tuple[int, ...], dtype: str | None = "float32") -> None:
        """Add the router's buffer e_score_correction_bias.

        Published files store it in fp32 (headers of DeepSeek-V3 and MiniMax-M2). transformers 5.19 keeps it in
        fp32 if _keep_in_fp32_modules_strict or the constructor requires it. Otherwise the buffer is loaded in
        the model's dtype, which is given as ``dtype`` None.
        """
        self.buffer(name, shape, "Router", dtype, "float32")

    def corrected_experts(
        self, at: str, count: int, hidden: int, inner: int, dtype: str | None = "float32"
    ) -> None:
        """Add a router, its correction bias of dtype ``dtype``, and routed experts below module ``at``."""
        self.router(f"{at}.gate", count, hidden)
        self.correction_bias(f"{at}.gate.e_score_correction_bias", (count,), dtype)
        self.experts(f"{at}.experts", count, hidden, inner)

    def conv1d(self, module: str, channels: int, kernel: int, *, bias: bool = False) -> None:
        """Add a convolution along the sequence, separate for each channel: weight and, with ``bias``, bias."""
        self.add(f"{module}.weight", (channels, 1, kernel), "mixer", "Conv1d", shard=0)
        if bias:
            self.add(f"{module}.bias", (channels,), "mixer", "Conv1d", shard=0)

    def short_conv(self, at: str, hidden: int, kernel: int, bias: bool) -> None:
        """Add the tensors of LFM's gated convolution along the sequence, below module ``at``."""
        self.conv1d(f"{at}.conv", hidden, kernel, bias=bias)
        self.linear(f"{at}.in_proj", 3 * hidden, hidden, "mixer", bias=bias, shard="column")
        self.linear(f"{at}.out_proj", hidden, hidden, "mixer", bias=bias, shard="row")

    def rotary(self, dim: int, *prefixes: str) -> None:
        """Add the fp32 buffers inv_freq and original_inv_freq of rotary tables over ``dim`` values of a head.

        There is one table per name prefix in ``prefixes``. Source: transformers 5.19, *RotaryEmbedding.
        """
        shape = ((dim + 1) // 2,)  # arange(0, dim, 2) has dim / 2 entries, rounded up.
        for prefix in prefixes:
            for name in ("inv_freq", "original_inv_freq"):
                spec = TensorSpec(f"{prefix}{name}", shape, "buffer", "RotaryEmbedding", dtype="float32")
                self.specs.append(spec)


def tensors_of(recipe: Recipe) -> Tensors:
    """Return the tensors of a model that a `Recipe` describes.

    They belong to the embedding, the layers, the final norm, the head and the rotary embedding.
    """
    t = Tensors()
    t.linear_class = recipe.linear_class
    first = recipe.embedding
    t.vocabulary(first.name, first.rows, first.width)
    if first.positions is not None:
        t.embedding(*first.positions, recipe.hidden)
    if first.projected is not None:
        t.linear(first.projected[0], recipe.hidden, first.width, "embedding")
    if recipe.head.projected is not None:
        t.linear(recipe.head.projected, first.width, recipe.hidden, "embedding")
    if first.norm is not None:
        t.norm(first.norm.name, first.norm.size, _LEARNED.get(first.norm.kind, "rms"))
    t.specs += first.buffers
    for index, at in t.layers(len(recipe.layers), recipe.at):
        layer = recipe.layers[index]
        for branch in layer.branches:
            module = branch.module
            if isinstance(module, Attention | LatentAttention):
                _attention(t, at, module) if isinstance(module, Attention) else latent(t, at, module)
            elif isinstance(module, Experts):
                _experts(t, at, module)
            else:
                _mlp(t, at, module)
        _extra(t, at, layer.extra)
        for branch in layer.branches:
            for norm in (branch.before, branch.after, branch.summed):
                _norm(t, at, norm)
            if branch.weighted is not None:
                t.add(f"{at}.{branch.weighted}", (first.width,), "norm", "DogeDecoderLayer")
    if recipe.final is not None:
        t.norm(recipe.final.name, recipe.final.size, _LEARNED.get(recipe.final.kind, "rms"))
    t.specs += recipe.head.buffers
    t.head("lm_head", first.rows, first.width, f"{first.name}.weight" if recipe.head.tied else None,
           recipe.head.bias)  # fmt: skip
    for table in recipe.tables:
        t.rotary(table.dim, table.name)
    return t


def _norm(t: Tensors, at: str, norm: Norm | None, kv_heads: int = 0) -> None:
    """Add the tensors of ``norm`` below module ``at``; do nothing if ``norm`` is None.

    If the norm's weight has a row per head, tensor parallelism divides its rows like those of ``kv_heads`` KV
    heads.
    """
    if norm is None:
        return
    if norm.own:
        shape, kv = (norm.groups, norm.size), (kv_heads, kv_heads)
        t.add(f"{at}.{norm.name}.weight", shape, "norm", "LayerNorm", shard=0, kv=kv)
        return
    learned = _LEARNED.get(norm.kind, "rms")
    names = [f"{norm.name}.norms.{i}" for i in range(norm.groups)] if norm.each else [norm.name]
    for name in names:
        t.norm(f"{at}.{name}", norm.size, learned)


def _extra(t: Tensors, layer: str, extra: tuple[TensorSpec, ...]) -> None:
    """Add the tensors ``extra``, whose names are relative to the module ``layer``."""
    t.specs += [replace(spec, name=f"{layer}.{spec.name}", layer=t.layer) for spec in extra]


def _attention(t: Tensors, layer: str, a: Attention) -> None:
    """Add the tensors of the attention module that ``a`` describes, below module ``layer``."""
    at = f"{layer}.{a.name}"
    if a.qkv is not None:
        t.fused_attention(at, a.heads, qkv=a.qkv, out=a.out, bias=a.bias, out_bias=a.out_bias)
    else:
        t.attention(at, a.heads, bias=a.bias, out_bias=a.out_bias, out=a.out)
    _norm(t, at, a.q_norm)
    _norm(t, at, a.k_norm, a.heads.kv_heads)
    _norm(t, at, a.before_out)
    _extra(t, layer, a.extra)


def latent(t: Tensors, layer: str, a: LatentAttention) -> None:
    """Add the tensors of latent attention below module ``layer``.

    Every tensor-parallel rank holds the projections to the latent and the rotary key in full. The projections
    per head are divided among the ranks.
    """
    at, q = f"{layer}.{a.name}", a.heads * a.head_size
    if a.q_rank is None:
        t.linear(f"{at}.q_proj", q, a.hidden, shard="column")
    else:
        t.linear(f"{at}.q_a_proj", a.q_rank, a.hidden, bias=a.bias)
        t.norm(f"{at}.q_a_layernorm", a.q_rank)
        t.linear(f"{at}.q_b_proj", q, a.q_rank, shard="column")
    t.linear(f"{at}.kv_a_proj_with_mqa", a.entry, a.hidden, bias=a.bias)
    t.norm(f"{at}.kv_a_layernorm", a.kv_rank)
    t.linear(f"{at}.kv_b_proj", a.heads * (a.nope + a.value), a.kv_rank, shard="column")
    t.linear(f"{at}.o_proj", a.hidden, a.heads * a.value, bias=a.bias, shard="row")
    _extra(t, layer, a.extra)


def _mlp(t: Tensors, at: str, m: Mlp) -> None:
    """Add the tensors of the MLP that ``m`` describes, below module ``at``."""
    at = f"{at}.{m.name}" if m.name else at
    if len(m.names) == 3:
        gate, up, down = m.names
        t.gated_mlp(at, m.hidden, m.inner, bias=m.bias, names=(gate, up, down))
    else:
        up, down = m.names
        t.plain_mlp(at, m.hidden, m.inner, bias=m.bias, names=(up, down), fused_gate=m.fused)
    _norm(t, at, m.before_out)


def _experts(t: Tensors, layer: str, e: Experts) -> None:
    """Add the tensors of the router, the experts and the shared expert that ``e`` describes, in ``layer``."""
    at, router = f"{layer}.{e.name}", e.router
    if e.first:
        t.experts(f"{at}.experts", e.count, e.hidden, e.inner, transposed=e.biased, bias=e.biased)
    t.router(
        f"{at}.{router.name}", e.count, e.hidden, linear=router.linear, bias=router.bias, dtype=router.dtype,
        stored=router.stored,
    )  # fmt: skip
    if not e.first:
        t.experts(f"{at}.experts", e.count, e.hidden, e.inner, transposed=e.biased, bias=e.biased)
    _extra(t, layer, e.extra)
    if e.shared is not None:
        _mlp(t, layer, e.shared)
    if e.shared_gate is not None:
        t.linear(f"{at}.{e.shared_gate}", 1, e.hidden, "router")
