"""A decoder as data: what its modules are called, how large they are and in which order they run.

Families (families/llama.py, gemma.py ...) write recipes; two interpreters read them: families/tensors.py makes
the TensorSpecs of the loaded model, training/activations.py the tensors autograd keeps of a training step. What
keeps no tensor (residual and logit multipliers, scaled embeddings) is not part of a recipe.

Names are those of transformers' state dict, relative to the layer (``self_attn``) or the module (``q_proj``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.planner.model.tensor import TensorSpec

NormKind = Literal[
    "rms",
    "rms-one",
    "rms-wide",
    "rms-cast",
    "layer",
    "layer-weight",
    "layer-written",
    "layer-one",
    "layer-none",
]
"""How the modules of transformers 5.19 compute it:

``rms``: normalized in fp32, cast back, times the weight (Llama). The others multiply in fp32 and cast last:
``rms-one`` by 1 + weight (Gemma), ``rms-wide`` by the weight (OLMo 2), ``rms-cast`` by the weight's fp32 copy
(Helium). ``layer``: torch's LayerNorm; ``layer-weight``: without a bias; ``layer-written``: out of single
operations in fp32 (Cohere); ``layer-one``: by 1 + weight (Nemotron); ``layer-none``: in fp32, nothing learned
(OLMo).
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """Geometry of one attention module."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    value: int | None = None

    @property
    def value_size(self) -> int:
        return self.head_size if self.value is None else self.value


@dataclass(frozen=True, slots=True)
class Norm:
    """Over ``size`` values, ``groups`` times a token. ``each``: a module for each group (``name.norms.0``);
    ``own``: a row of the weight for each."""

    name: str
    size: int
    kind: NormKind = "rms"
    groups: int = 1
    each: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first ``dim`` values of each head. ``tables``: which of the model's tables.

    ``joined``: rotated and other values are concatenated, which orders memory by heads. ``fresh``: each layer
    interleaves tables of its own; ``apart``: for q and for k, in their type or in fp32 (``wide``), and memory
    stays ordered by tokens (GPT-J). ``restored``: the result has q's type again.
    """

    dim: int
    tables: str = ""
    joined: bool = False
    fresh: bool = False
    apart: Literal["", "typed", "wide"] = ""
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections, optional norms of q and k, rotary embedding, attention, output projection.

    ``qkv``: name of a fused projection, taken apart by views but for those of q, k and v that ``copied`` names;
    ``repeated``: K and V are repeated to all heads by it. ``normed_last``: q and k are normed once rotated.
    ``clipped``: q, k and v are clamped in place. ``softcap``: of the scores, in eager attention. ``masked``: a
    mask is passed where none is needed. ``broadcast``: SDPA is given fewer heads of K and V than of Q, which
    its fused kernels refuse. ``narrow``: eager softmax in the model's type instead of fp32; ``upcast``: eager
    scores of fp32 copies of q and k; ``filled``: eager scores are filled where a boolean mask says so, all
    layers keep that mask; ``sinks``: a learned score stands beside the eager ones. ``before_out``: a
    norm in front of the output projection. ``extra``: as a layer's.
    """

    name: str
    heads: Heads
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    qkv: str | None = None
    bias: bool = False
    out_bias: bool = False
    copied: str = ""
    repeated: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    normed_last: bool = False
    rope: Rope | None = None
    clipped: bool = False
    softcap: bool = False
    masked: bool = False
    broadcast: bool = False
    narrow: bool = False
    upcast: bool = False
    filled: bool = False
    sinks: bool = False
    before_out: Norm | None = None
    dropout: float = 0.0
    extra: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA: K and V of every head are made from one latent of ``kv_rank`` values and one rotary key of
    ``rotary`` per token. A head of q and k has ``nope`` more values, which are not rotated, one of v ``value``.
    ``q_rank`` None: the query is not compressed. ``extra``: as a layer's."""

    hidden: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rotary: int
    value: int
    bias: bool = False
    name: str = "self_attn"
    rope: Rope | None = None
    dropout: float = 0.0
    extra: tuple[TensorSpec, ...] = ()

    @property
    def entry(self) -> int:
        """Elements kept per token and layer."""
        return self.kv_rank + self.rotary

    @property
    def head_size(self) -> int:
        return self.nope + self.rotary


@dataclass(frozen=True, slots=True)
class Mlp:
    """``names``: gate, up, down; or gate-and-up, down (``fused``); or up, down (no gate). ``before_out``: a
    norm in front of the last."""

    name: str
    hidden: int
    inner: int
    act: str
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    fused: bool = False
    bias: bool = False
    before_out: Norm | None = None


RouterKind = Literal[
    "softmax", "softmax-float", "softmax-chosen", "softmax-typed", "softmax-clamped", "softmax-groups",
    "sigmoid", "sigmoid-groups", "mixer", "other",
]  # fmt: skip
"""``softmax``: over all experts in fp32, the chosen weights back in the logits' type (Qwen);
``softmax-float``: the same, left in fp32 (Mixtral); ``softmax-chosen``: over the chosen logits (Granite);
``softmax-typed``: the same, in the logits' type (gpt-oss);
``softmax-clamped``: in fp32 from the first product on, also under autocast, the sum clamped (ERNIE 4.5);
``sigmoid``: of each logit in fp32 (MiniMax-M2); ``sigmoid-groups``: from fp32 copies of input and weight, where
groups of experts are chosen first (GLM-4.5); ``softmax-groups``: the same by softmax, a group is as good as its
best expert (DeepSeek-V2); ``mixer``: two experts sampled one by one (Phi-3.5-MoE);
``other``: not known to the training interpreter."""


@dataclass(frozen=True, slots=True)
class Router:
    """``name``: below the module. ``normed``: the chosen weights are divided by their sum. ``groups``: how many
    there are and are chosen of (0: none). ``noisy``: the input is multiplied by noise, here and before.
    ``linear``: an nn.Linear; ``dtype``, ``stored``: see TensorSpec."""

    name: str
    kind: RouterKind
    normed: bool
    groups: tuple[int, int] = (1, 1)
    noisy: bool = False
    linear: bool = False
    bias: bool = False
    dtype: str | None = None
    stored: str | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """``count`` routed experts of ``inner``, ``chosen`` of which a token goes through: gated MLPs held as two
    tensors a layer. ``shared``: an MLP every token goes through (its name is relative to the layer),
    ``shared_gate``: named where a sigmoid weighs it. ``first``: they stand before the router in the state dict.
    ``biased``: with biases, matrices stored [experts, in, out]. ``extra``: as a layer's."""

    name: str
    hidden: int
    inner: int
    count: int
    chosen: int
    act: str
    router: Router
    shared: Mlp | None = None
    shared_gate: str | None = None
    extra: tuple[TensorSpec, ...] = ()
    first: bool = False
    biased: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """``residual + dropout(after(module(before(x))))``; ``weighted``: the residual times a learned vector;
    ``summed``: a norm of the sum."""

    module: Attention | LatentAttention | Mlp | Experts
    before: Norm | None = None
    after: Norm | None = None
    dropout: float = 0.0
    weighted: str | None = None
    summed: Norm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """``parallel``: every branch reads the layer's input; one without a norm of its own shares the norm before
    it. ``extra``: tensors no module above has, named relative to the layer."""

    branches: tuple[Branch, ...]
    parallel: bool = False
    extra: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Embedding:
    """``positions``: name and rows of a learned table added to it, ``each``: of ids made for each sequence;
    ``projected``: name and outputs of a matrix behind it; ``norm`` the last. ``buffers`` lie behind it."""

    name: str
    rows: int
    width: int
    positions: tuple[str, int] | None = None
    dropout: float = 0.0
    each: bool = False
    projected: tuple[str, int] | None = None
    norm: Norm | None = None
    buffers: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """``softcap``: tanh of the logits; ``projected``: name of a matrix before it, to the embedding's width;
    ``buffers`` lie before it."""

    tied: bool
    bias: bool = False
    softcap: bool = False
    projected: str | None = None
    buffers: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rotary frequencies of ``dim`` values; ``wide``: their cos and sin stay in fp32. ``complex``: each pair is
    one complex number instead. ``half``: no value stands in them twice."""

    name: str
    dim: int
    wide: bool = False
    complex: bool = False
    half: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole decoder. ``layers``: one entry for each layer (equal ones are one object), named ``at``.index.
    ``taped``: whether the training
    interpreter's figure is exact; where it is not, activations are estimated."""

    at: str
    embedding: Embedding
    layers: tuple[Layer, ...]
    final: Norm | None
    head: Head
    tables: tuple[Table, ...] = ()
    linear_class: str = "Linear"
    taped: bool = True

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.embedding.projected[1] if self.embedding.projected else self.embedding.width


Flow = Literal["pre", "post", "summed", "sandwich", "parallel"]


def layer_of(
    flow: Flow,
    attention: Attention | LatentAttention,
    mlp: Mlp | Experts,
    norms: tuple[Norm, ...],
    dropouts: tuple[float, float] = (0.0, 0.0),
    extra: tuple[TensorSpec, ...] = (),
) -> Layer:
    """Attention and MLP with ``norms`` in the order of the computation: before each (``pre``), behind each
    (``post``), of each sum (``summed``), both (``sandwich``, four norms), or side by side with one norm or two
    (``parallel``)."""
    before: tuple[Norm | None, ...] = norms[:2] if len(norms) > 1 else (*norms, None)
    after: tuple[Norm | None, ...] = (None, None)
    if flow == "sandwich":
        before, after = norms[::2], norms[1::2]
    elif flow == "post":
        before, after = after, before
    summed: tuple[Norm | None, ...] = (None, None)
    if flow == "summed":
        before, summed = summed, before
    branches = (
        Branch(attention, before[0], after[0], dropouts[0], summed=summed[0]),
        Branch(mlp, before[1], after[1], dropouts[1], summed=summed[1]),
    )
    return Layer(branches, flow == "parallel", extra)
