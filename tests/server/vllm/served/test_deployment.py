"""Tests that convert a real VllmConfig into our Deployment, field by field, for every flag of vLLM."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose import filled
from vllm.config import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.host import cpu_features
from tonnage.planner.errors import DeploymentError
from tonnage.planner.output.emit import emit
from tonnage.planner.planning.build import make_plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.vllm.deployment import read_config

POOL = 256 * 2**20

# Deployment field -> (flags of vLLM, what the field is then).
FLAGS: dict[str, tuple[dict[str, Any], Any]] = {
    "gpu_memory_utilization": ({"gpu_memory_utilization": 0.5}, 0.5),
    "dtype": ({"dtype": "float32"}, "float32"),
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
    "max_model_len": ({"max_model_len": 777}, 777),
    "max_num_seqs": ({"max_num_seqs": 7}, 7),
    "max_num_batched_tokens": ({"max_num_batched_tokens": 1234}, 1234),
    "block_size": ({"block_size": 64}, 64),
    "kv_cache_memory_bytes": ({"kv_cache_memory_bytes": 2 * POOL}, 2 * POOL),
    "enable_prefix_caching": ({"enable_prefix_caching": False}, False),
    "num_gpu_blocks_override": ({"num_gpu_blocks_override": 99}, 99),
    "tensor_parallel_size": ({"tensor_parallel_size": 3}, 3),
    "pipeline_parallel_size": ({"pipeline_parallel_size": 2}, 2),
    "data_parallel_size": ({"data_parallel_size": 2}, 2),
    "enforce_eager": ({"enforce_eager": True}, True),
    "cpu_offload_bytes": ({"cpu_offload_gb": 1.5}, 3 * 2**29),
    "enable_lora": ({"enable_lora": True}, True),
    "max_loras": ({"enable_lora": True, "max_loras": 3}, 3),
    "max_lora_rank": ({"enable_lora": True, "max_lora_rank": 64}, 64),
    "speculative_model": ({"speculative_config": "draft"}, "draft"),
    "num_speculative_tokens": ({"speculative_config": "draft"}, 3),
    "quantization": ({"quantization": "fp8"}, "fp8"),
    "runner": ({"runner": "pooling"}, "pooling"),
}
# Set by other things than a flag of vLLM's, or not by vLLM here (states: float32 on a CPU with AVX512-BF16).
OTHERS = {
    "calibration", "mamba_ssm_cache_dtype", "mamba_cache_mode", "num_gpus", "device_memory_used",
    # of a model that reads pictures, which the demo model does not; see
    # test_vllms_image_limits_are_read_into_the_plan_settings
    "language_model_only", "skip_mm_profiling",
    "limit_mm_per_prompt", "mm_processor_kwargs", "disable_chunked_mm_input", "mm_encoder_tp_mode",
    "engine", "engine_version", "device", "gpu", "device_memory", "mem_fraction_static",
    "swa_full_tokens_ratio", "mamba_full_memory_ratio",
    "decode_context_parallel_size", "enable_expert_parallel",
    # of the host's memory beside GPUs, which nothing in vLLM is sized by or compared with
    "load_format", "safetensors_load_strategy", "mm_processor_cache_bytes", "kv_offloading_bytes",
    "kv_offloading_disk", "kv_offloading_policy", "kv_offloading_backend", "kv_transfer_config",
    "enable_hierarchical_cache",
    "hicache_ratio", "hicache_size", "hicache_mem_layout", "hicache_storage_backend",
    "enable_sleep_mode", "cache_ram_bytes", "flash_attn", "kv_unified", "n_gpu_layers",
    # of CUDA graphs, which no CPU captures
    "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cuda_graph_sizes",
}  # fmt: skip


def config_of(**flags: Any) -> Any:
    if flags.get("speculative_config") == "draft":
        flags["speculative_config"] = {
            "method": "draft_model", "model": str(ensure_demo()), "num_speculative_tokens": 3,
        }  # fmt: skip
    flags = {"kv_cache_memory_bytes": POOL, "max_model_len": 2048, "enforce_eager": False, **flags}
    return EngineArgs(model=str(ensure_demo()), **flags).create_engine_config()


@pytest.fixture(scope="module")
def plain() -> Any:
    return config_of()


def test_every_field_of_the_plan_settings_has_a_vllm_flag_that_a_test_covers() -> None:
    assert set(FLAGS) | OTHERS == set(Deployment.__match_args__)


def test_default_vllm_config_is_read_as_the_default_plan_settings(plain: Any) -> None:
    asked = read_config(plain)
    assert asked.model == str(ensure_demo())
    flags = asked.deployment
    assert (flags.engine, flags.device, flags.gpu) == ("vllm", "cpu", None)
    states = "float32" if "avx512_bf16" in cpu_features() else "auto"  # platforms/cpu.py
    assert (flags.decode_context_parallel_size, flags.mamba_ssm_cache_dtype) == (1, states)
    assert flags.block_size is None  # vLLM's own 128 is the planner's too
    assert make_plan(asked.model, flags).kv_cache.layout.block_size == plain.cache_config.block_size == 128


@pytest.mark.parametrize("field", FLAGS)
def test_each_vllm_flag_is_read_into_its_plan_setting(field: str, plain: Any) -> None:
    flags, value = FLAGS[field]
    if value == "draft":
        value = str(ensure_demo())
    found, before = asdict(read_config(config_of(**flags)).deployment), asdict(read_config(plain).deployment)
    assert found[field] == value
    assert before[field] != value
    # Nothing else changes, but for what vLLM itself makes of the flag.
    changed = {name for name in found if found[name] != before[name]}
    follows = {"max_num_batched_tokens", "max_num_seqs", "enable_lora", "speculative_model", "enforce_eager"}
    assert changed <= {field, "num_speculative_tokens"} | follows


def test_vllms_image_limits_are_read_into_the_plan_settings() -> None:
    config = config_of()
    config.model_config.multimodal_config = MultiModalConfig(skip_mm_profiling=True)
    flags = read_config(config).deployment
    assert (flags.skip_mm_profiling, flags.limit_mm_per_prompt) == (True, "{}")
    config.model_config.multimodal_config = MultiModalConfig(limit_per_prompt={"image": 0, "audio": 3})
    assert read_config(config).deployment.limit_mm_per_prompt == '{"image": 0}'


def test_vllms_parallel_and_gpu_flags_are_read_into_the_plan_settings() -> None:
    config = config_of()
    config.parallel_config.enable_expert_parallel = True
    config.parallel_config.decode_context_parallel_size = 2
    config.device_config.device_type = "cuda"
    flags = read_config(config).deployment
    assert (flags.enable_expert_parallel, flags.decode_context_parallel_size) == (True, 2)
    assert (flags.device, flags.gpu) == ("cuda", "auto")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"hf_overrides": {"max_position_embeddings": 4096}}, "hf_overrides"),
        ({"revision": "0123abc"}, "revision"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers"),
    ],
)
def test_vllm_settings_that_the_planner_does_not_support_are_rejected_by_name(
    flags: dict[str, Any], named: str
) -> None:
    with pytest.raises(DeploymentError, match=named):
        read_config(config_of(**flags))


def test_first_of_several_served_model_names_of_vllm_is_used() -> None:
    assert read_config(config_of(served_model_name=["first", "second"])).name == "first"
    assert read_config(config_of()).name == str(ensure_demo())


# -- the files in deploy/ that start a vllm serve


DEPLOY = Path(__file__).resolve().parents[4] / "deploy"


@pytest.mark.parametrize("planned", [True, False])
def test_vllm_flags_in_the_compose_file_exist_in_vllm(planned: bool) -> None:
    """Settings that a plan writes for compose reach vLLM, and all others keep vLLM's defaults."""
    plan = make_plan(
        "demo", Deployment(engine="vllm", kv_cache_memory_bytes=POOL, max_model_len=2048, max_num_seqs=17)
    )
    lines = [line for line in emit(plan, "compose-env").splitlines() if not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines) if planned else {"MODEL": "org/model"}
    service = yaml.safe_load((DEPLOY / "vllm" / "compose.yaml").read_text())["services"]["vllm"]
    words = shlex.split(filled(service["command"], variables))
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    said, others = parser.parse_known_args(words)
    assert others == [variables["MODEL"], "--host", "0.0.0.0"]  # of vllm serve itself
    assert said.scheduler_cls == "tonnage.server.engines.vllm.scheduler.TonnageScheduler"
    assert 0 < said.shutdown_timeout < int(service["stop_grace_period"].removesuffix("s"))
    default = parser.parse_args([])
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
        mine = getattr(plan.deployment, name) if name != "kv_cache_memory_bytes" else plan.rank.kv_pool_bytes
        assert getattr(said, name) == (mine if planned else getattr(default, name)), name
    assert said.gpu_memory_utilization == (1.0 if planned else default.gpu_memory_utilization)


def test_vllm_flags_in_the_helm_chart_exist_in_vllm() -> None:
    text = (DEPLOY / "helm" / "tonnage" / "templates" / "_shared.tpl").read_text()
    (names,) = re.findall(r"\$same := list ((?:\"\w+\" ?)+)", text)
    same = set(re.findall(r"\w+", names))
    ours = {field.name for field in dataclasses.fields(Deployment)}
    assert same <= ours & {field.name for field in dataclasses.fields(EngineArgs)}
    # Whatever a plan writes is one of them, or of the machine.
    plan = make_plan(
        "demo", Deployment(engine="vllm", device="cuda", device_memory=80 * 2**30, tensor_parallel_size=3)
    )
    settings = yaml.safe_load(emit(plan, "helm-values"))["settings"]
    assert settings["tensor_parallel_size"] == 3
    assert settings.keys() <= same | {"device", "device_memory"}
