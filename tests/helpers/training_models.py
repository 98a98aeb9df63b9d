"""Tiny real models and their plans: shared by the tests that train them and benchmarks/training_accuracy.py."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from training_rows import ROWS

from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training.activations import ActivationSetup, activations_of
from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import TrainingModel, model_from
from tonnage.planner.training.precision import convention_of, frozen_bytes
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.values import Kernels

FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma", "mistral", "gemma2", "gemma3_text", "gpt_neox", "falcon", "gpt_bigcode",
)  # fmt: skip
"""Rows that are trained in every way: adapters, optimizers, real steps."""

PLAIN_KERNELS = Kernels()


def config_of(row: str, **overrides: Any) -> dict[str, Any]:
    """Return a copy of the config of a row of training_rows.py."""
    return {"model_type": row.partition("-")[0], **json.loads(json.dumps(ROWS[row])), **overrides}


def training_model(row: str, **overrides: Any) -> TrainingModel:
    config = config_of(row, **overrides)
    return model_from(row, build_architecture(config))


def planner(row: str) -> Planner:
    return Planner(training_model(row))


def planned_bytes(
    row: str,
    setup: TrainingSetup,
    targets: frozenset[str],
    batch: int,
    length: int,
    kernels: Kernels = PLAIN_KERNELS,
    **overrides: Any,
) -> int:
    """Return the planned value of ``saved_bytes`` on the CPU."""
    model = training_model(row, **overrides)
    attention = model.attention(setup.attention)
    kept = ActivationSetup(
        attention, setup.method, setup.rank, targets, setup.trainable_layers, False, convention_of(setup),
        frozen_bytes(setup), cuda=False, single=batch == 1, kernels=kernels,
    )  # fmt: skip
    acts = activations_of(model.recipe, model.masked(length), kept, model.estimated)
    total = acts.shared + acts.embedding.total + acts.head.total + acts.loss
    casts = sum(ends.casts + ends.frozen_casts for ends in (acts.embedding, acts.head))
    for _, count, kept in acts.layers:
        total = total + kept.total.times(count)
        casts += count * (kept.casts + kept.frozen_casts)
    return total.at(batch, length) + casts


def real_model(row: str, attention: str = "sdpa", dtype: str = "float32", **overrides: Any) -> Any:
    """Return the transformers model of a row with random weights, in training mode.

    A class without SDPA attention uses eager attention, as it does by default in transformers.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(**config_of(row, **overrides))
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    attention = attention if cls._supports_sdpa else "eager"
    return cls._from_config(config, attn_implementation=attention, dtype=getattr(torch, dtype)).train()


def storages(tensors: Any) -> dict[int, int]:
    """Return the bytes of the distinct storages of tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def saved_bytes(model: Any, batch: int, length: int, *, autocast: bool) -> int:
    """Return the bytes autograd keeps after a forward pass with a loss, without parameters and buffers."""
    import torch

    own = storages([*model.parameters(), *model.buffers()])
    kept: dict[int, tuple[int, Any]] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that no address is used twice
        return tensor

    ids = torch.randint(0, 500, (batch, length))
    region = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), region:
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(size for size, _ in kept.values())
