"""Training methods (full, LoRA, QLoRA, IA3, freeze): which tensors of a model each trains or adds.

LoRA and IA3 shapes are as PEFT 0.21 builds them. Default target modules are PEFT's own for each family
(`Family.lora`, `Family.ia3`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.families.registry import family_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import ELEMENT_BYTES
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.quantization.read import quantized_to
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.training.precision import frozen_bytes
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import nf4_torchao_bytes, stack_of
from tonnage.planner.training.tape import IA3_FEED_FORWARD

LINEARS = ("Linear", "KeptLinear", "FalconLinear", "Conv1D")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """A group of tensors with equal shape and role, of the model or of its adapters.

    Attributes:
        name: the tensors' name with `*` in place of the layer index.
        layers: layer index of each tensor, None for a tensor outside the layers.
        trainable: whether the tensors are trained.
        adapter: whether PEFT adds the tensors.
        frozen_bytes: bytes of one tensor while it is not trained.
        shard_dim: the dimension that tensor parallelism divides, None for a replicated tensor.
        kv_rows: rows of K and V in a fused QKV matrix.
        kv_units: number of KV heads in these rows.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    module_class: str
    layers: tuple[int | None, ...]
    trainable: bool
    adapter: bool = False
    frozen_bytes: int = 0
    shard_dim: int | None = None
    kv_rows: int = 0
    kv_units: int = 0

    @property
    def elements(self) -> int:
        """Return the number of elements of one tensor of the group."""
        return prod(self.shape)

    @property
    def count(self) -> int:
        """Return the number of tensors in the group."""
        return len(self.layers)


@dataclass(frozen=True)
class Trained:
    """A model's tensors under a training method.

    Attributes:
        held: groups of equal tensors, trained and frozen ones, adapters included.
        targets: name patterns of the modules that have adapters.
        buffer_bytes: bytes of the model's buffers.
    """

    held: tuple[TensorGroup, ...]
    targets: frozenset[str]
    buffer_bytes: int

    @cached_property
    def parameters(self) -> int:
        """Return the number of parameters of the base model; tied tensors count once."""
        return sum(h.elements * h.count for h in self.held if not h.adapter)

    @cached_property
    def trainable(self) -> int:
        """Return the number of trained parameters of the model, adapters included."""
        return sum(h.elements * h.count for h in self.held if h.trainable)

    @cached_property
    def adapters(self) -> int:
        """Return the number of parameters of the model's adapters (LoRA, IA3)."""
        return sum(h.elements * h.count for h in self.held if h.adapter)


def pattern(name: str) -> str:
    """Return a tensor's name with `*` for indices, such as `model.layers.*.self_attn.q_proj.weight`."""
    return re.sub(r"\.\d+\.", ".*.", name)


def train_under(architecture: Architecture, setup: TrainingSetup) -> Trained:
    """Return the model's tensors under the setup's training method, each trained or frozen.

    Raises:
        DeploymentError: for target modules or trained layers that the model does not have.
        UnsupportedArchitecture: for QLoRA of a model without an nn.Linear.
    """
    own = [t for t in architecture.tensors if t.is_parameter and t.tied_to is None]
    buffers = sum(
        t.elements * ELEMENT_BYTES[t.dtype or "bfloat16"] for t in architecture.tensors if t.role == "buffer"
    )
    quantization = quantized_to(setup.base_quantization) if setup.method == "qlora" else Quantization()
    if setup.method == "qlora" and not any(quantization.converts(t) for t in own):
        raise UnsupportedArchitecture(
            f"bitsandbytes replaces no module of {architecture.class_name}: its linear layers are not of the "
            "class nn.Linear",
            field="--method",
            hint="use --method lora",
        )
    first_trained = architecture.layers - setup.trainable_layers
    stack = stack_of(setup)

    def frozen(tensor: TensorSpec) -> int:
        """Return the bytes that a tensor takes while it is not trained."""
        quantized = setup.method == "qlora" and quantization.converts(tensor)
        if quantized and stack.nf4 == "torchao":
            return nf4_torchao_bytes(tensor.elements)
        wide = frozen_bytes(setup) == 4 or (setup.method == "qlora" and stack.upcasts and not quantized)
        return quantization.bytes_after_load(tensor, "float32" if wide else "bfloat16")

    groups: dict[tuple[str, tuple[int, ...], bool], list[TensorSpec]] = {}
    for tensor in own:
        trainable = setup.method == "full" or (
            setup.method == "freeze" and tensor.layer is not None and tensor.layer >= first_trained
        )
        groups.setdefault((pattern(tensor.name), tensor.shape, trainable), []).append(tensor)
    held = [
        TensorGroup(
            name, shape, tensors[0].role, tensors[0].module_class, tuple(t.layer for t in tensors), trainable,
            frozen_bytes=frozen(tensors[0]),
            shard_dim=tensors[0].shard_dim, kv_rows=tensors[0].kv_rows, kv_units=tensors[0].kv_units,
        )
        for (name, shape, trainable), tensors in groups.items()
    ]  # fmt: skip
    if setup.method == "freeze" and setup.trainable_layers > architecture.layers:
        raise DeploymentError(
            f"{setup.trainable_layers} is more than the model's {architecture.layers} layers",
            field="--trainable-layers",
        )
    targets: frozenset[str] = frozenset()
    if setup.method in ("lora", "qlora", "ia3"):
        adapters, targets = _adapters(architecture, own, setup)
        held += adapters
    return Trained(tuple(held), targets, buffers)


def target_names(architecture: Architecture) -> tuple[str, ...]:
    """Return the names that PEFT's target modules may have in this model, such as `q_proj`.

    Each is the last component of a linear module's name. They are in the order of the model's modules.
    """
    names = (t.module.rpartition(".")[2] for t in architecture.tensors if t.module_class in LINEARS)
    return tuple(dict.fromkeys(names))


def default_targets(setup: TrainingSetup, model_type: str) -> tuple[str, ...] | None:
    """Return PEFT's default target modules of LoRA or IA3 for a model type, None without a default."""
    family = family_of(model_type)
    return family.ia3 if setup.method == "ia3" else family.lora


def _adapters(
    architecture: Architecture, own: list[TensorSpec], setup: TrainingSetup
) -> tuple[list[TensorGroup], frozenset[str]]:
    """Return the tensors of a model's adapters (LoRA, IA3), and name patterns of the adapted modules."""
    wanted = setup.target_modules
    if wanted is None:
        wanted = default_targets(setup, architecture.model_type)
        if wanted is None:
            raise DeploymentError(
                f"PEFT has no default for {architecture.model_type}",
                field="--target-modules",
                hint="all-linear, or some of: " + ", ".join(target_names(architecture)),
            )
    head = {t.module for t in architecture.tensors if t.role == "head"}
    weights = [
        t for t in own
        if t.name.endswith(".weight") and len(t.shape) == 2 and t.module_class in (*LINEARS, "Embedding")
    ]  # fmt: skip
    if wanted == ("all-linear",):
        matched = [t for t in weights if t.module_class in LINEARS and t.module not in head]
    else:
        ends = tuple(f".{name}" for name in wanted)
        matched = [t for t in weights if f".{t.module}".endswith(ends)]
        for name in wanted:
            if not any(f".{t.module}".endswith(f".{name}") for t in matched):
                raise DeploymentError(
                    f"{architecture.class_name} has no module {name!r}",
                    field="--target-modules",
                    hint="it has " + ", ".join(target_names(architecture)),
                )
    out: dict[tuple[str, tuple[int, ...]], list[TensorSpec]] = {}
    for tensor in matched:
        for suffix, shape in _adapter_shapes(tensor, setup):
            out.setdefault((f"{pattern(tensor.module)}.{suffix}", shape), []).append(tensor)
    held = []
    for (name, shape), tensors in out.items():
        # Where the base weight is divided, tensor parallelism divides one LoRA factor (A or B) along that
        # dimension and replicates the other factor.
        side = tensors[0].shard_dim if name.endswith(("lora_B.weight", "lora_A.weight")) else None
        dim = side if side == (0 if name.endswith("lora_B.weight") else 1) else None
        layers = tuple(t.layer for t in tensors)
        held.append(TensorGroup(name, shape, "adapter", "Adapter", layers, True, True, shard_dim=dim))
    return held, frozenset(pattern(t.module) for t in matched)


def _adapter_shapes(tensor: TensorSpec, setup: TrainingSetup) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name suffix, shape) of each LoRA or IA3 tensor of a module.

    LoRA has A [rank, in] and B [out, rank]. IA3 has one scale per input of a feed-forward module, and one per
    output of other modules (peft/tuners/ia3/layer.py).
    """
    out, into = tensor.shape if tensor.module_class != "Conv1D" else tensor.shape[::-1]
    if setup.method == "ia3":
        feed_forward = tensor.module.endswith(IA3_FEED_FORWARD)
        return [("ia3_l", (1, into) if feed_forward else (out, 1))]
    # For an embedding [vocabulary, hidden], LoRA has A [rank, vocabulary] and B [hidden, rank].
    if tensor.module_class == "Embedding":
        out, into = into, out
    return [("lora_A.weight", (setup.rank, into)), ("lora_B.weight", (out, setup.rank))]
