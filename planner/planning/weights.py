"""Weight bytes of a rank: the sum over its tensors in their stored formats, and a term per kind of tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import ELEMENT_BYTES
from tonnage.planner.model.tensor import HeaderTensor, TensorSpec
from tonnage.planner.plans import Term, WeightFormat
from tonnage.planner.quantization.scheme import Quantization

# Rows and columns of the largest block in oneDNN's packed weight formats (tags such as BA16a64b2a, oneDNN 3).
# On a CPU, vLLM stores linear layers in these formats (model_executor/layers/utils.py, vLLM 0.32.0).
_TILE = 64

_FIELDS = {
    "embedding": "vocab_size, hidden_size",
    "attention": "num_attention_heads, num_key_value_heads, head_dim, hidden_size",
    "mlp": "hidden_size, intermediate_size",
    "expert": "num_experts, moe_intermediate_size, hidden_size",
    "router": "num_experts, hidden_size",
    "mixer": "the state-space or linear-attention fields",
    "encoder": "the encoder's fields",
    "vision": "vision_config",
    "audio": "audio_config",
    "projector": "vision_config, hidden_size",
    "norm": "hidden_size",
    "head": "vocab_size, hidden_size, tie_word_embeddings",
    "buffer": "rope_parameters",
}


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the weights that one rank holds after loading.

    Attributes:
        total: expected bytes.
        high: upper bound of the bytes.
        terms: one memory term per kind of tensor.
        formats: bytes of each storage format (dtype and quantization).
    """

    total: int
    high: int
    terms: tuple[Term, ...]
    formats: tuple[WeightFormat, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Bytes of the weights that one rank holds on its device, with padding and without offloaded weights.

    Attributes:
        loaded: the weights as the engine loads them.
        padding: bytes by which kernels pad the weights.
        rounding: bytes that the allocator adds because it rounds the size of each tensor up.
        offloaded: bytes moved to the host's memory.
        padding_high: upper bound of `padding`, where the engine selects a kernel only while loading.
        buffers: bytes of input buffers for the tokens of one step, which the engine allocates with the weights.
    """

    loaded: Weights
    padding: int
    rounding: int
    offloaded: int
    padding_high: int = 0
    buffers: int = 0

    @property
    def bytes(self) -> int:
        """Return the bytes on the device: loaded, padding, rounding and buffers, less the offloaded bytes."""
        return self.loaded.total + self.padding + self.rounding + self.buffers - self.offloaded

    def added_terms(self) -> list[Term]:
        """Return the memory terms of allocator rounding and kernel padding that are not zero."""
        terms = (
            Term(
                "weights.allocator_rounding", self.rounding,
                "blocks of the CUDA allocator that are not split for less than 1 MiB", "tensor sizes",
            ),
            Term(
                "weights.kernel_padding", self.padding,
                "experts padded to the MXFP4 kernel's tiles; 16-bit copies of MLA's up-projections", "--gpu",
            ),
            Term(
                "weights.step_buffers", self.buffers,
                "max_num_batched_tokens x (levels x hidden_size x bytes of dtype, or index_topk x 4)",
                "deepstack_input_embeds or topk_indices_buffer of vLLM's model class",
            ),
        )  # fmt: skip
        return [term for term in terms if term.value]


def hold_weights(
    architecture: Architecture,
    quantization: Quantization,
    deployment: Deployment,
    stored_copies: tuple[TensorSpec, ...] = (),
) -> HeldWeights:
    """Return the weights that one rank holds on its device, including padding, rounding and offloaded bytes.

    `stored_copies` are tied tensors that the checkpoint stores a second time.
    """
    engine = engine_of(deployment.engine)
    loaded = sum_weights(architecture, quantization, deployment, stored_copies)
    padding = engine.kernel_padding(architecture, quantization, deployment)
    rounding = engine.allocator_rounding(architecture, quantization, deployment)
    most = engine.most_kernel_padding(architecture, quantization, deployment)
    return HeldWeights(
        loaded, padding, rounding, min(deployment.cpu_offload_bytes, loaded.total), max(padding, most)
    )


def sum_weights(
    architecture: Architecture,
    quantization: Quantization,
    deployment: Deployment,
    stored_copies: tuple[TensorSpec, ...] = (),
) -> Weights:
    """Return the bytes of the weights that a rank holds for its part of the model after loading.

    The bytes include parameters, buffers and quantization state. `stored_copies` are tied tensors that the
    checkpoint stores a second time. A copy is loaded separately only if its values differ, so copies count only
    in the upper bound. On a CPU, vLLM may repack linear weights into padded tiles; the padding, too, counts
    only in the upper bound.
    """
    engine, dtype = engine_of(deployment.engine), deployment.dtype
    kernels = engine.kernels.get(deployment.device, {})
    total = 0
    slack = sum(copy.elements * ELEMENT_BYTES[dtype] for copy in stored_copies)
    kinds: dict[tuple[str, tuple[int, ...]], _TensorKind] = {}
    formats: dict[tuple[str, str], int] = {}
    for tensor in engine.tensors(architecture, deployment):
        if architecture.unread:
            slack += _biases_and_norms(tensor, deployment.tensor_parallel_size)
        found = quantization.format_of(tensor)
        converted = found is not None
        held = quantization.bytes_after_load(tensor, dtype)
        repacked = found is not None and kernels.get(found.kind.name) in found.kind.loaded
        if repacked:
            held = sum(quantization.loaded_parts(tensor, kernels).values())
        total += held
        if held:
            # Scales and code books are counted in the bytes of the weight that they belong to.
            stored = tensor.dtype or dtype if found is None else found.kind.stored_as or quantization.scheme
            key = (stored, quantization.scheme if converted else "none")
            formats[key] = formats.get(key, 0) + held
        if (
            engine.tiles_linear
            and not repacked
            and tensor.module_class.endswith("Linear")
            and len(tensor.shape) == 2
        ):
            slack += _tiled(tensor.shape, held) - held
        pattern = _unnumbered(tensor.name)
        kind = kinds.get((pattern, tensor.shape))
        if kind is None:
            kinds[pattern, tensor.shape] = _TensorKind(tensor, converted, 1, held)
        else:
            kind.count += 1
            kind.value += held
    terms = tuple(_term(pattern, kind, quantization, kernels, dtype) for (pattern, _), kind in kinds.items())
    return Weights(
        total, total + slack, terms, tuple(WeightFormat(*key, size) for key, size in formats.items())
    )


def as_stored(held: HeldWeights, whole: int, tensors: tuple[HeaderTensor, ...], known_from: str) -> HeldWeights:
    """Return the weights `held` of a rank, for an engine that keeps the tensor types of the GGUF file.

    `known_from` is the source of the tensor types, such as the GGUF header, which the plan's terms name.

    The fraction of the file's bytes that the rank holds is `held.loaded.total` / `whole`. Both numbers are
    bytes of dequantized weights: those of the rank and those of the undivided model.
    """
    share = held.loaded.total
    sums: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        count, size = sums.get(tensor.dtype, (0, 0))
        sums[tensor.dtype] = count + 1, size + tensor.nbytes
    divided = "" if share == whole else f" x {share:,} / {whole:,} (this rank's share)"
    terms = tuple(
        Term(
            f"weights.{name}", -(-size * share // whole), f"{size:,}, {count} tensors of {name}{divided}",
            known_from,
        )
        for name, (count, size) in sums.items()
    )  # fmt: skip
    total = sum(term.value for term in terms)
    formats = tuple(WeightFormat(name, "gguf", term.value) for name, term in zip(sums, terms, strict=True))
    return replace(held, loaded=Weights(total, total, terms, formats), offloaded=min(held.offloaded, total))


@dataclass(slots=True)
class _TensorKind:
    """All tensors of the model with the same shape and the same name except for layer and list indices.

    `first` is one of these tensors, `converted` whether they are quantized, `value` the sum of their bytes.
    """

    first: TensorSpec
    converted: bool
    count: int
    value: int


@lru_cache(16384)
def _unnumbered(name: str) -> str:
    """Return the tensor's name with `*` in place of layer and list indices."""
    return ".".join("*" if piece.isdigit() else piece for piece in name.split("."))


def _biases_and_norms(tensor: TensorSpec, ranks: int) -> int:
    """Return an upper bound of the bytes of a weight matrix's bias and of the norms before and after it.

    The bound is three float32 vectors for each side of the matrix. It is multiplied by `ranks`, because every
    tensor parallel rank holds such vectors in full.
    """
    if len(tensor.shape) < 2 or not tensor.is_parameter or tensor.tied_to is not None:
        return 0
    *several, rows, columns = tensor.shape
    return prod(several) * 3 * (rows + columns) * ELEMENT_BYTES["float32"] * ranks


def _tiled(shape: tuple[int, ...], held: int) -> int:
    """Return the bytes of a matrix of `held` bytes after padding its sides to multiples of oneDNN's tiles."""
    padded = prod(-(-side // _TILE) * _TILE for side in shape)
    return held * padded // prod(shape)


def _term(
    pattern: str, kind: _TensorKind, quantization: Quantization, kernels: Mapping[str, str], dtype: str
) -> Term:
    """Return the memory term, with its formula, of all tensors of one kind."""
    first = kind.first
    shape = " x ".join(f"{size:,}" for size in first.shape) or "1"
    if first.tied_to is not None:
        formula = f"tied to {first.tied_to}"
    elif kind.converted:
        held = quantization.loaded_parts(first, kernels)
        parts = " + ".join(f"{name} {size:,}" for name, size in held.items())
        formula = f"{kind.count} x ({parts}); {quantization.describe()} of [{shape}]"
    else:
        kept = first.dtype or dtype
        formula = f"{kind.count} x {shape} x {ELEMENT_BYTES[kept]} ({kept})"
    source = "the engine's code" if first.module_class == "Attention" else _FIELDS[first.role]
    return Term(f"weights.{pattern}", kind.value, formula, source)
