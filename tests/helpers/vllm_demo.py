"""What the tests behind one vLLM server share: its settings, and adapters of the demo model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

POOL, LENGTH, SEQUENCES, RANK, SLOTS = 512 * 2**20, 2048, 16, 8, 2
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a fox who",
    "def fibonacci(n):",
    "Q: What is 12 times 12?\nA:",
]
ADAPTED = PROMPTS[::2]  # prompts for the adapters
MAX_TOKENS = 24
# More than a block of 128 tokens: the server's shared system prompt.
SYSTEM = "You answer questions about the harbour: ships, cranes, tides and the price of a berth. " * 10
# SmolLM2-135M: hidden size 576, 30 layers, 3 KV heads of 64.
SHAPES = {"q_proj": (576, 576), "v_proj": (192, 576)}


@dataclass(frozen=True)
class Bare:
    """The results of vLLM without Tonnage.

    They are the greedy texts of `PROMPTS`, the texts of `ADAPTED` with each adapter, the bytes of the LoRA
    slots and the blocks of the pool.
    """

    texts: list[str]
    adapted: dict[str, list[str]]
    slots: int
    blocks: int


def make_adapter(folder: Path, seed: int, *, rank: int = RANK) -> Path:
    """Write a random LoRA adapter of the demo model in PEFT's format; return its folder."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        for name, (out, into) in SHAPES.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, into, generator=draw) / into**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, rank, generator=draw) * 0.2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "lora_dropout": 0.0,
        "bias": "none", "target_modules": list(SHAPES), "base_model_name_or_path": "demo",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
