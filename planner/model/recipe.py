"""Recipe: a description of a decoder as data, with the names, sizes and order of its modules.

Model families (families/llama.py, gemma.py and others) create recipes, and two modules interpret them.
families/tensors.py derives the tensors of the loaded model. training/activations.py derives the tensors that
autograd keeps in a training step. Operations without a tensor (residual and logit multipliers, scaled
embeddings) are not part of a recipe.

All names are parts of names in transformers' state dict, relative to the layer (`self_attn`) or to the module
(`q_proj`).
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
"""How the modules of transformers 5.19 compute a normalization.

- ``rms``: normalize in fp32, cast back, multiply by the weight (Llama).
- ``rms-one``: multiply by 1 + weight in fp32, then cast (Gemma).
- ``rms-wide``: multiply by the weight in fp32, then cast (OLMo 2).
- ``rms-cast``: multiply by the weight's fp32 copy, then cast (Helium).
- ``layer``: torch's LayerNorm.
- ``layer-weight``: LayerNorm without a bias.
- ``layer-written``: LayerNorm from single operations in fp32 (Cohere).
- ``layer-one``: LayerNorm that multiplies by 1 + weight (Nemotron).
- ``layer-none``: LayerNorm in fp32 without parameters (OLMo).
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of one attention module: hidden size, heads, KV heads, head size, and the head size of V."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    value: int | None = None

    @property
    def value_size(self) -> int:
        """Return the number of elements of V per attention head."""
        return self.head_size if self.value is None else self.value


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalization layer over `size` values.

    Attributes:
        groups: number of groups per token that are normalized separately, each of `size` values (such as one
            per head).
        each: whether each group has a separate module (`name.norms.0`).
        own: whether the weight has one row per group.
    """

    name: str
    size: int
    kind: NormKind = "rms"
    groups: int = 1
    each: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `dim` values of each head.

    Attributes:
        tables: name of the model's rotary frequency table that this module uses.
        joined: whether rotated and unrotated values are concatenated into a new tensor, with the head dimension
            before the token dimension.
        fresh: whether each layer makes its own interleaved copy of the frequency tables.
        apart: `typed` (in their own dtype) or `wide` (in fp32) if q and k are rotated separately and keep the
            token dimension before the head dimension (GPT-J); empty otherwise.
        restored: whether the result is cast back to q's dtype.
    """

    dim: int
    tables: str = ""
    joined: bool = False
    fresh: bool = False
    apart: Literal["", "typed", "wide"] = ""
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module: projections, optional norms of q and k, rotary embedding, output projection.

    Attributes:
        qkv: name of a fused projection of q, k and v, or None.
        copied: letters (from q, k and v) of the tensors that are copied out of the fused projection; the other
            tensors are views.
        repeated: whether these copies also repeat K and V for all query heads.
        normed_last: whether q and k are normalized after the rotation.
        clipped: whether q, k and v are clamped in place.
        softcap: whether eager attention caps the scores by tanh.
        masked: whether an attention mask is passed even if none is needed.
        broadcast: whether SDPA receives fewer KV heads than query heads, so that its fused kernels cannot run.
        narrow: whether the softmax of eager attention runs in the model's dtype instead of fp32.
        upcast: whether eager attention computes the scores from fp32 copies of q and k.
        filled: whether eager attention overwrites masked scores by means of a boolean mask that all layers
            keep.
        sinks: whether eager attention adds a learned score per head (attention sink).
        before_out: a norm before the output projection, or None.
        extra: additional tensors, such as attention sinks or a mask buffer, named relative to the layer.
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
    """Multi-head latent attention (MLA).

    K and V of every head are computed from one latent of `kv_rank` values and one rotary key of `rotary` values
    per token.

    Attributes:
        q_rank: rank of the compressed query, or None if the query is not compressed.
        nope: values per head of q and k that are not rotated.
        rotary: rotated values per head of q and k.
        value: values per head of v.
        extra: additional tensors, such as those of a sparse indexer, named relative to the layer.
    """

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
        """Return the number of elements of the MLA latent that one layer caches per token."""
        return self.kv_rank + self.rotary

    @property
    def head_size(self) -> int:
        """Return the number of elements of q and k per attention head."""
        return self.nope + self.rotary


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward module (MLP) of a decoder layer.

    Attributes:
        names: names of the projections: gate, up and down; if `fused`, gate-and-up and down; without a gate, up
            and down.
        before_out: a norm before the last projection, or None.
    """

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
"""How a router computes the weights of the experts.

- ``softmax``: over all experts in fp32; the chosen weights are cast to the logits' dtype (Qwen).
- ``softmax-float``: over all experts in fp32, without the cast (Mixtral).
- ``softmax-chosen``: over the chosen logits, in fp32 (Granite).
- ``softmax-typed``: over the chosen logits, in the logits' dtype (gpt-oss).
- ``softmax-clamped``: in fp32 from the first product on, also under autocast; the sum is clamped (ERNIE 4.5).
- ``softmax-groups``: groups of experts are chosen first, by their best expert's softmax (DeepSeek-V2).
- ``sigmoid``: of each logit in fp32 (MiniMax-M2).
- ``sigmoid-groups``: from fp32 copies of input and weight; groups of experts are chosen first (GLM-4.5).
- ``mixer``: two experts sampled one by one (Phi-3.5-MoE).
- ``other``: not known to the training interpreter.
"""


@dataclass(frozen=True, slots=True)
class Router:
    """The router that selects the experts of each token in a mixture of experts.

    Attributes:
        name: name relative to the module of the experts.
        normed: whether the routing weights of the selected experts are divided by their sum.
        groups: (number of groups of experts, number of groups selected per token). They are used only if `kind`
            ends in `-groups`; (0, 0) means that no groups are selected.
        noisy: whether the inputs of the MoE block and of the router are multiplied by random noise.
        linear: whether the router is an nn.Linear.
        dtype: the parameter's dtype as in TensorSpec; None for the model's dtype.
        stored: the dtype in checkpoints as in TensorSpec.
    """

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
    """Routed experts: gated MLPs whose weights one layer stores as two tensors.

    Attributes:
        inner: width of each expert.
        count: number of experts.
        chosen: number of experts selected per token.
        shared: the shared expert, an MLP used for every token and named relative to the layer; or None.
        shared_gate: name of the sigmoid gate that weights the shared MLP, or None.
        extra: additional tensors, such as a correction bias of the router, named relative to the layer.
        first: whether the experts precede the router in the state dict.
        biased: whether the experts have biases and matrices stored as [experts, in, out].
    """

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
    """A residual branch of a decoder layer: `residual + dropout(after(module(before(x))))`.

    Attributes:
        weighted: name of a learned vector by which the residual is multiplied, or None.
        summed: a norm applied to the sum of residual and branch, or None.
    """

    module: Attention | LatentAttention | Mlp | Experts
    before: Norm | None = None
    after: Norm | None = None
    dropout: float = 0.0
    weighted: str | None = None
    summed: Norm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer with its residual branches.

    Attributes:
        parallel: whether all branches read the layer's input; a branch without a norm then uses the output of
            the preceding branch's norm.
        extra: additional tensors of the layer that its branches do not describe, such as the learned scalars of
            an activation function, named relative to the layer.
    """

    branches: tuple[Branch, ...]
    parallel: bool = False
    extra: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Embedding:
    """The token embedding of a decoder.

    Attributes:
        positions: (name, number of rows) of a learned position table that is added to the embedding, or None.
        each: whether the tensor of position ids has a separate row for each sequence.
        projected: (name, output size) of a matrix after the embedding, or None.
        norm: a norm after embedding, positions and projection, or None.
        buffers: buffers that follow the embedding in the state dict.
    """

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
    """The output head of a decoder.

    Attributes:
        softcap: whether tanh caps the logits.
        projected: name of a matrix before the head that maps hidden states to the embedding's width, or None.
        buffers: buffers that precede the head in the state dict.
        labels: number of labels of a classifier, or None for a head over the vocabulary.
    """

    tied: bool
    bias: bool = False
    softcap: bool = False
    projected: str | None = None
    buffers: tuple[TensorSpec, ...] = ()
    labels: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of rotary frequencies for `dim` values of a head.

    Attributes:
        wide: whether cos and sin stay in fp32.
        complex: whether the table stores one complex number per pair of values instead of cos and sin.
        half: whether the table stores each frequency once instead of twice.
    """

    name: str
    dim: int
    wide: bool = False
    complex: bool = False
    half: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole decoder as data: embedding, layers, final norm and head.

    Attributes:
        at: name of the list of layers, such as `model.layers`; the name of layer i is `model.layers.i`.
        layers: one entry per layer; equal layers are the same object.
        taped: whether the activations of training/activations.py are exact for this recipe; otherwise they are
            estimated.
    """

    at: str
    embedding: Embedding
    layers: tuple[Layer, ...]
    final: Norm | None
    head: Head
    tables: tuple[Table, ...] = ()
    linear_class: str = "Linear"
    taped: bool = True

    @property
    def logits(self) -> int:
        """Return the number of logits per token: labels of a classifier, else the vocabulary's size."""
        return self.embedding.rows if self.head.labels is None else self.head.labels

    @property
    def hidden(self) -> int:
        """Return the width of the residual stream (hidden size), in elements."""
        return self.embedding.projected[1] if self.embedding.projected else self.embedding.width


Flow = Literal["pre", "post", "summed", "sandwich", "parallel"]


def layer_of(
    flow: Flow,
    attention: Attention | LatentAttention,
    mlp: Mlp | Experts,
    norms: tuple[Norm, ...],
    dropouts: tuple[float, float] = (0.0, 0.0),
) -> Layer:
    """Return a decoder layer of one attention module and one MLP.

    Args:
        flow: positions of the norms: `pre` before each module, `post` after each module, `summed` after each
            residual addition, `sandwich` before and after each module (four norms). With `parallel`, both
            modules read the layer's input, through one norm or one norm each.
        attention: the attention module.
        mlp: the feed-forward module.
        norms: the norms in the order of computation.
        dropouts: dropout probabilities of attention and MLP.
    """
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
    return Layer(branches, flow == "parallel")
