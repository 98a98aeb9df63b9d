"""Models with random weights that the steps plan, load and serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a random model.

    Attributes:
        name: name in the output.
        config: name of a config class of transformers.
        fields: fields of the config.
    """

    name: str
    config: str
    fields: dict[str, Any]


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, **more: Any) -> Spec:
    fields = {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": 32_000,
        "max_position_embeddings": 4096, "head_dim": hidden // heads, "eos_token_id": None,
    }  # fmt: skip
    return Spec(name, "LlamaConfig", fields | more)


def _gemma(layers: int, hidden: int, head_size: int, window: int, vocab: int = 32_000) -> Spec:
    fields = {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": head_size, "intermediate_size": 3 * hidden, "vocab_size": vocab, "sliding_window": window,
        "max_position_embeddings": 4096, "eos_token_id": None,
        "layer_types": ["full_attention" if at % 2 else "sliding_attention" for at in range(layers)],
    }  # fmt: skip
    return Spec("windows", "Gemma3TextConfig", fields)


def _experts(layers: int, hidden: int, experts: int, vocab: int = 32_000) -> Spec:
    fields = {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 2 * hidden, "moe_intermediate_size": hidden // 2,
        "num_experts": experts, "num_experts_per_tok": 2, "vocab_size": vocab, "decoder_sparse_step": 1,
        "max_position_embeddings": 4096, "mlp_only_layers": [], "eos_token_id": None,
    }  # fmt: skip
    return Spec("experts", "Qwen3MoeConfig", fields)


# A GPU serves models of 125M and 1B parameters (the shape of Llama 3.2 1B), a CPU a few layers.
_VOCABULARY = {"vocab_size": 500}
_SIZES = {
    "cuda": {
        "small": _llama("llama-125m", 12, 768, 12, 4, 2048),
        "large": _llama("llama-1b", 16, 2048, 32, 8, 8192, vocab_size=128_256, tie_word_embeddings=True),
        "windows": _gemma(12, 640, 256, 512),
        "experts": _experts(8, 512, 16),
    },
    "cpu": {
        "small": _llama("llama-small", 2, 128, 2, 1, 256, **_VOCABULARY),
        "large": _llama("llama-larger", 3, 256, 4, 2, 512, **_VOCABULARY),
        "windows": _gemma(2, 64, 64, 24, 500),
        "experts": _experts(2, 128, 4, 500),
    },
}
# Query heads, KV heads and head size of the attention cases: MHA, GQA and MQA, head sizes 64 to 256.
HEADS = ((4, 4, 64), (8, 2, 64), (8, 1, 128), (6, 2, 96), (4, 2, 256))


def spec(kind: str, device: str) -> Spec:
    """Return the shape of a kind of model (`small`, `large`, `windows`, `experts`) for a device."""
    return _SIZES[device][kind]


def with_heads(heads: int, kv_heads: int, head_size: int) -> Spec:
    """Return a model of two layers with the given attention heads."""
    name = f"{heads} heads, {kv_heads} KV heads of {head_size}"
    return _llama(name, 2, heads * 32, heads, kv_heads, 128, head_dim=head_size, **_VOCABULARY)


def write(shape: Spec, folder: Path, dtype: str) -> Path:
    """Write a checkpoint of random weights unless it exists; return its folder.

    Weights are drawn wider than an initialization, so that the choice of a token does not depend on rounding.
    """
    made = folder / f"{shape.name.replace(', ', '-').replace(' ', '-')}-{dtype}"
    if (made / "config.json").exists():
        return made
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, shape.config)(**shape.fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15 if parameter.shape[-1] < 512 else 0.03)
    model.save_pretrained(made)
    return made


@dataclass(frozen=True, slots=True)
class Target:
    """The device under test and the folder of the random models.

    Attributes:
        device: `cuda` or `cpu`.
        folder: folder in which the models are written.
        memory: bytes of the device's memory, None for the machine's own.
        model: folder of a real model, which the attention step checks too; None for random models only.
    """

    device: str
    folder: Path
    memory: int | None = None
    model: Path | None = None

    def plan(self, model: Path, dtype: str, **flags: Any) -> Plan:
        """Return the plan of a model on this device, with a pool of 64 MiB (512 MiB on a GPU) by default."""
        pool = 512 << 20 if self.device == "cuda" else 64 << 20
        deployment = Deployment(
            device=self.device, device_memory=self.memory, dtype=dtype, kv_cache_memory_bytes=pool,
            max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=256,
        )  # fmt: skip
        return make_plan(str(model), replace(deployment, **flags))
