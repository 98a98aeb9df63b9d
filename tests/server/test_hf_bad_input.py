"""Checkpoints, dtypes and machines that the Hugging Face engine rejects early, with a named reason."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import PATIENCE
from transformers import LlamaConfig, LlamaForCausalLM

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import CheckpointError, DeploymentError, UnsupportedArchitecture
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.hf import HFEngine
from tonnage.server.engines.hf.model.loading import require_computed
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.support import require_fixed_rotary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a random Llama model with two layers."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def plan_for(folder: Path) -> Plan:
    small = Deployment(dtype="float32", kv_cache_memory_bytes=4 << 20, max_model_len=256, max_num_seqs=8)
    return make_plan(str(folder), small)


def change(folder: Path, *, drop: str = "", **tensors: torch.Tensor) -> None:
    """Rewrite the checkpoint; dots in names are written as double underscores."""
    path = folder / "model.safetensors"
    held = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    held |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(held, path, {"format": "pt"})


def test_checkpoint_with_a_missing_tensor_is_rejected(folder: Path) -> None:
    plan = plan_for(folder)
    change(folder, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: model\.layers\.1\.mlp\.up_proj\.weight"):
        ModelRunner(plan)
    with pytest.raises(CheckpointError, match="up_proj"):  # the planner saw it without loading anything
        plan_for(folder)


def test_error_for_a_tensor_of_the_wrong_shape_names_the_tensor(folder: Path) -> None:
    plan = plan_for(folder)
    change(folder, model__norm__weight=torch.ones(32))
    with pytest.raises(CheckpointError, match=r"another shape .*: model\.norm\.weight"):
        ModelRunner(plan)


async def test_unused_checkpoint_tensors_are_named_and_rejected_at_start(folder: Path) -> None:
    """Add a layer that the config lacks: without the check, another model would be served silently."""
    change(folder, model__layers__2__mlp__up_proj__weight=torch.ones(96, 64))
    engine = HFEngine(plan_for(folder))
    with pytest.raises(
        CheckpointError, match=r"has 1 tensor that the model does not use: model\.layers\.2\.mlp"
    ):
        await engine.start()


async def test_pickled_or_missing_weights_are_rejected_before_the_engine_process_starts(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    empty = HFEngine(plan_for(folder))
    with pytest.raises(CheckpointError, match="has no weights"):
        await empty.start()
    torch.save({}, folder / "pytorch_model.bin")
    pickled = HFEngine(plan_for(folder))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin only, and loading a pickle can run"):
        await pickled.start()
    assert (empty.pid, pickled.pid) == (None, None)


def test_dtype_without_arithmetic_support_is_rejected() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        require_computed(dtype, "cpu")
    with pytest.raises(DeploymentError, match="does not compute in float8_e4m3fn on this cpu") as refused:
        require_computed(torch.float8_e4m3fn, "cpu")
    assert refused.value.field == "--dtype"
    assert "bfloat16" in (refused.value.hint or "")


@pytest.mark.timeout(300)
def test_out_of_memory_while_loading_reports_planned_and_available_bytes() -> None:
    ensure_demo()
    plan = make_plan("demo", Deployment(kv_cache_memory_bytes=32 << 20, max_model_len=512))
    limit = plan.rank.used_bytes - plan.rank.weights_bytes

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0"]
    ended = subprocess.run(
        [*command, "--kv-cache-memory-bytes", "32MiB", "--max-model-len", "512"],
        preexec_fn=limited,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 2
    assert "out of memory while loading" in ended.stderr
    assert f"the plan needs {plan.rank.used_bytes:,} bytes" in ended.stderr
    assert "available now" in ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("rotary", "longest"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 4096),
        ({"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {}}, 8192),
    ],
)
def test_rope_scaling_that_depends_on_the_batch_is_rejected_beyond_the_original_context(
    rotary: dict[str, object], longest: int
) -> None:
    config = {"max_position_embeddings": 8192, "rope_parameters": rotary}
    require_fixed_rotary(config, longest)
    with pytest.raises(UnsupportedArchitecture, match="longest sequence of the batch") as refused:
        require_fixed_rotary(config, longest + 1)
    assert refused.value.hint == f"--max-model-len {longest}"
    require_fixed_rotary({**config, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 1 << 20)


@pytest.mark.parametrize(
    ("model_type", "needs"),
    [
        ("t5", "a cache of cross-attention for each request"),
        ("whisper", "a cache of cross-attention for each request"),
        ("deepseek_v3", "a latent pool"),
        ("qwen3_next", "a pool of states"),
        ("jamba", "a pool of states"),
        ("bloom", "a bias for each head"),
        ("gpt_oss", "a sink for each head"),
    ],
)
async def test_error_for_an_unsupported_model_family_names_the_missing_feature(
    model_type: str, needs: str, folder: Path
) -> None:
    engine = HFEngine(plan_for(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with pytest.raises(UnsupportedArchitecture, match=f"'{model_type}' is not served .*{needs}"):
        await engine.start()
    assert engine.pid is None
