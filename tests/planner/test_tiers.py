"""Tests of KV tiers: bytes on host and ranks, tokens, and connectors and sizes that are refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tonnage.planner.command import run
from tonnage.planner.engines.runtime.host import pinned
from tonnage.planner.engines.vllm.tier import tokens_held
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.model.layout import KVGroup
from tonnage.planner.output.json import plan_to_dict
from tonnage.planner.planning.advice import serve_lines
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.source.resolve import ModelSource

GIB = 1 << 30
LLAMA, DEEPSEEK = "meta-llama/Meta-Llama-3.1-8B", "deepseek-ai/DeepSeek-V3"
HYBRID, GEMMA = "Qwen/Qwen3.5-27B", "google/gemma-3-27b-it"
BLOCK = 2 * 16 * 8 * 128 * 2 * 32  # bytes of 16 tokens of Llama 3.1 8B on one rank


@pytest.fixture
def plan_of(config_of):
    def plan(name: str, **flags):
        flags.setdefault("gpu", "h100-80g")
        return plan_source(ModelSource(name, name, config_of(name), "hub"), deployment_of(flags))

    return plan


def config(connector: str, **extra) -> str:
    return json.dumps({"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra})


def native(**extra) -> dict:
    """Return the flag of an OffloadingConnector with these settings."""
    return {"kv_transfer_config": config("OffloadingConnector", **extra)}


def only(plan):
    (tier,) = plan.tiers
    return tier


def test_offloading_size_flag_and_equal_transfer_config_plan_the_same_kv_tier(plan_of) -> None:
    size = only(plan_of(LLAMA, kv_offloading_bytes=10 * GIB))
    given = only(plan_of(LLAMA, kv_transfer_config=config("OffloadingConnector", cpu_bytes_to_use=10 * GIB)))
    assert size == given
    assert (size.chunks, size.chunk_bytes, size.tokens) == (10 * GIB // BLOCK, BLOCK, 10 * GIB // BLOCK * 16)
    assert (size.shared, size.pinned, size.rank_bytes) == (True, True, None)


def test_kv_tier_with_larger_chunks_holds_a_whole_number_of_chunks(plan_of) -> None:
    extra = {"cpu_bytes_to_use": 10 * GIB + 1}
    for more in ({"block_size": 512}, {"blocks_per_chunk": 32}):
        tier = only(plan_of(LLAMA, kv_transfer_config=config("OffloadingConnector", **extra, **more)))
        assert (tier.chunk_bytes, tier.chunks, tier.tokens) == (32 * BLOCK, 160, 160 * 512)
        assert tier.groups[0].chunk_tokens == 512


@pytest.mark.parametrize(
    ("groups", "block", "length", "chunks", "tokens"),
    [
        ([("full", None)] + 9 * [("state", None)], 528, 36_432, 8000, 3_736_615),
        ([("full", None), ("sliding", 1024), ("state", None)], 256, 36_864, 4000, 989_637),
    ],
)
def test_tokens_of_a_host_tier_for_a_hybrid_equal_the_published_examples(
    groups, block, length, chunks, tokens
) -> None:
    """The examples are those of vllm-project/vllm#53902."""
    layers = tuple(KVGroup(kind, (place,), window=window) for place, (kind, window) in enumerate(groups))
    hosted = SimpleNamespace(
        layout=SimpleNamespace(groups=layers, block_size=block),
        chosen=SimpleNamespace(
            max_model_len=length, flags=SimpleNamespace(decode_context_parallel_size=1)
        ),
    )  # fmt: skip
    assert tokens_held(hosted, chunks) == tokens


def test_older_vllm_versions_pin_one_host_tensor_for_each_layer_of_a_kv_cache_group(plan_of) -> None:
    """vllm-project/vllm#53042: 24 tensors a rank, each rounded up to a power of two; here 16 slots."""
    flags = {"engine_version": "0.26.0", "tensor_parallel_size": 4, "max_model_len": 8192}
    plan = plan_of(HYBRID, kv_offloading_bytes=200 * GIB, **flags)
    tier, slots = only(plan), plan.kv_cache.layout.layer_slots
    each = pinned(tier.chunks * plan.kv_cache.layout.slot_bytes)
    assert (tier.rank_bytes, tier.value) == (slots * each, 4 * slots * each)
    assert tier.low <= 200 * GIB < tier.value <= tier.high
    # one tensor of all layers for a model with one group
    llama = only(plan_of(LLAMA, kv_offloading_bytes=10 * GIB, engine_version="0.19.1"))
    assert llama.value == 16 * GIB
    count = only(plan_of(LLAMA, kv_transfer_config=config("OffloadingConnector", num_cpu_blocks=1000),
                         engine_version="0.11.0"))  # fmt: skip
    assert (count.chunks, count.tokens, count.requested) == (1000, 16_000, None)


def test_simple_offload_connector_divides_its_size_over_the_ranks(plan_of) -> None:
    name = "SimpleCPUOffloadConnector"
    tier = only(plan_of(LLAMA, tensor_parallel_size=2, kv_transfer_config=config(name)))
    assert (tier.value, tier.rank_bytes, tier.pinned, tier.shared) == (8 * GIB, 4 * GIB, True, False)
    own = only(plan_of(LLAMA, kv_transfer_config=config(name, cpu_bytes_to_use_per_rank=3 * GIB)))
    assert own.rank_bytes == 3 * GIB
    disk, staging = plan_of(
        LLAMA,
        kv_transfer_config=config(name, kv_offload_backend="disk", disk_path="/x", disk_capacity_bytes=GIB),
    ).tiers
    assert (disk.medium, disk.value, disk.chunks) == ("disk", GIB, GIB // BLOCK)
    assert (staging.medium, staging.value, staging.chunks) == ("host", 4 * BLOCK, None)


def test_lmcache_size_counts_once_per_rank_inside_vllm_and_once_in_total_with_a_server(plan_of) -> None:
    """LMCache#2901: the same number means each rank in one mode and the whole server in the other."""
    flags = {"tensor_parallel_size": 4, "max_model_len": 8192}
    extra = {"lmcache.max_local_cpu_size": 10, "lmcache.max_local_disk_size": 20, "lmcache.local_disk": "/x"}
    host, disk = plan_of(LLAMA, kv_transfer_config=config("LMCacheConnectorV1", **extra), **flags).tiers
    assert (host.rank_bytes, host.value, disk.value) == (10 * GIB, 40 * GIB, 80 * GIB)
    assert host.tokens == 40 * GIB // (131072 * 256) * 256
    plan = plan_of(LLAMA, kv_offloading_bytes=10 * GIB, kv_offloading_backend="lmcache", **flags)
    server = only(plan)
    assert (server.value, server.outside, server.tokens) == (10 * GIB, True, 10 * GIB // 131072)
    assert "lmcache server --l1-size-gb 10" in server.note
    assert "KV tier" not in {part.name for part in plan.host.parts}
    once = only(plan_of(DEEPSEEK, gpu="h200", tensor_parallel_size=8, max_model_len=8192,
                        kv_transfer_config=config("LMCacheConnectorV1")))  # fmt: skip
    assert (once.ranks, once.value) == (1, 5 * GIB)  # the first rank alone stores latents


def test_file_system_kv_tier_is_planned_without_an_upper_bound(plan_of) -> None:
    extra = {"cpu_bytes_to_use": GIB, "spec_name": "TieringOffloadingSpec",
             "secondary_tiers": [{"type": "fs", "root_dir": "/x"}]}  # fmt: skip
    plan = plan_of(LLAMA, kv_transfer_config=config("OffloadingConnector", **extra))
    host, disk = plan.tiers
    assert (disk.name, disk.value, disk.chunks, disk.chunk_bytes) == ("fs", None, None, host.chunk_bytes)
    assert any("no upper bound" in line for line in plan.host_lines())


def test_disk_tier_of_tonnage_is_planned_with_its_size(plan_of) -> None:
    tier = {"type": "tonnage", "path": "/x", "size": "2GiB"}
    extra = {"cpu_bytes_to_use": GIB, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    plan = plan_of(LLAMA, kv_transfer_config=config("OffloadingConnector", **extra))
    host, disk = plan.tiers
    (index,) = (part for part in plan.host.parts if part.name == "disk tier index")
    assert (index.value, index.low) == (425 * disk.chunks, 0)  # bytes per file in the learned order
    each = host.chunk_bytes + 4096 + 256  # header and directory entry
    assert disk.chunks == (2 * GIB - 258 * 4096 - 2 * (4096 + 256)) // each  # directories, lock, description
    assert (disk.value, disk.chunk_bytes, disk.tokens) == (2 * GIB, host.chunk_bytes, disk.chunks * 16)
    for missing in ("path", "size"):
        extra["secondary_tiers"] = [{name: value for name, value in tier.items() if name != missing}]
        with pytest.raises(DeploymentError, match="needs path and size"):
            plan_of(LLAMA, kv_transfer_config=config("OffloadingConnector", **extra))


def test_sglang_hicache_size_is_in_decimal_gigabytes_per_rank(plan_of) -> None:
    flags = {"engine": "sglang", "max_model_len": 8192, "enable_hierarchical_cache": True}
    plan = plan_of(LLAMA, hicache_size=100, tensor_parallel_size=2, **flags)
    tier = only(plan)
    tokens = 100 * 10**9 // 65536 + 1  # one page of padding
    assert (tier.tokens, tier.rank_bytes, tier.value) == (tokens, tokens * 65536, 2 * tokens * 65536)
    ratio = plan_of(LLAMA, hicache_ratio=1.5, block_size=64, **flags)
    pages = int(ratio.kv_cache.tokens * 1.5) // 64 + 1
    assert only(ratio).tokens == pages * 64
    assert only(ratio).low < only(ratio).value <= only(ratio).high
    assert "--enable-hierarchical-cache --hicache-ratio 1.5" in serve_lines(ratio)[-1]
    # DeepSeek's latents lie on one rank since 0.5.23
    for version, ranks in (("0.5.23", 1), ("0.5.9", 8)):
        latent = plan_of(DEEPSEEK, gpu="h200", tensor_parallel_size=8, engine_version=version, **flags)
        assert only(latent).ranks == ranks


def test_sglang_hicache_ratio_also_multiplies_the_mamba_state_slots(plan_of) -> None:
    """sglang#39851: of a hybrid, the ratio pins host slots for states beside those for tokens."""
    flags = {"engine": "sglang", "max_model_len": 8192, "enable_hierarchical_cache": True}
    plan = plan_of(HYBRID, tensor_parallel_size=2, **flags)
    tier = only(plan)
    slot, slots = _slot(plan)
    token = plan.kv_cache.layout.bytes_per_block
    assert tier.rank_bytes == (int(plan.kv_cache.tokens * 2) + 1) * token + (2 * slots + 1) * slot
    sized = only(plan_of(HYBRID, tensor_parallel_size=2, hicache_size=100, **flags))
    assert 0 <= sized.rank_bytes - 100 * 10**9 + token + slot <= 2 * (token + slot)


def test_sglang_hicache_divides_host_memory_between_states_and_kv_as_published(plan_of) -> None:
    """sglang#39851: at --hicache-ratio 4, 134 GB of states beside 149 GB of KV cache."""
    flags = {"engine": "sglang", "max_model_len": 8192, "enable_hierarchical_cache": True}
    plan = plan_of(HYBRID, tensor_parallel_size=2, hicache_ratio=4.0, **flags)
    tier = only(plan)
    kv = tier.tokens * plan.kv_cache.layout.bytes_per_block * tier.ranks
    assert (tier.value - kv) / kv == pytest.approx(134 / 149, rel=0.01)


def test_plan_with_hicache_size_does_not_fit_if_the_model_is_larger_than_the_gpu(plan_of) -> None:
    flags = {"engine": "sglang", "enable_hierarchical_cache": True, "hicache_size": 20}
    assert not plan_of("Qwen/Qwen3-235B-A22B", **flags).fits


def _slot(plan) -> tuple[int, int]:
    """Return bytes and number of the plan's state slots on one rank, from its note."""
    (note,) = [note for note in plan.notes if "slots of" in note]
    count, size = note.split(" slots of ")
    return int(size.split(" bytes")[0].replace(",", "")), int(count.replace(",", ""))


def test_kv_tiers_are_in_the_json_plan_and_in_the_container_memory_limit(plan_of) -> None:
    plain, plan = plan_of(LLAMA), plan_of(LLAMA, kv_offloading_bytes=10 * GIB)
    (told,) = plan_to_dict(plan)["tiers"]
    assert (told["name"], told["value"], told["shared"]) == ("OffloadingConnector", 10 * GIB, True)
    (part,) = [part for part in plan.host.parts if part.name == "KV tier"]
    assert (part.value, part.when, part.shared) == (10 * GIB, "serving", True)
    assert plan.host.high > plain.host.high + 9 * GIB
    assert plan_to_dict(plain)["tiers"] == []
    line = serve_lines(plan_of(LLAMA, kv_offloading_bytes=GIB, kv_offloading_backend="lmcache"))[-1]
    assert "--kv-offloading-backend lmcache --kv-offloading-size 1" in line


REFUSED = [
    (LLAMA, {"kv_transfer_config": "[]"}, "is not a JSON object"),
    (LLAMA, {"kv_transfer_config": "{"}, "is no JSON"),
    (LLAMA, {"kv_transfer_config": '{"kv_connectr": "x"}'}, "did you mean kv_connector?"),
    (LLAMA, {"kv_transfer_config": '{"kv_role": "kv_both"}'}, "names no kv_connector"),
    (LLAMA, {"kv_transfer_config": config("OfloadingConnector")}, "did you mean OffloadingConnector?"),
    (LLAMA, native(), "cpu_bytes_to_use must be specified"),
    (LLAMA, native(cpu_bytes=1), "did you mean cpu_bytes_to_use?"),
    (LLAMA, native(cpu_bytes_to_use="1G"), "not a whole number"),
    (LLAMA, native(cpu_bytes_to_use=5), "hold no chunk of 2,097,152"),
    (LLAMA, native(cpu_bytes_to_use=GIB, block_size=24), "no multiple"),
    (LLAMA, native(cpu_bytes_to_use=GIB, eviction_policy="lfu"),
     "neither lru nor arc"),
    (LLAMA, {"kv_transfer_config": config("SimpleCPUOffloadConnector", kv_offload_backend="tape")},
     "neither cpu nor disk"),
    (LLAMA, {"kv_transfer_config": config("LMCacheConnectorV1", **{"lmcache.max_local_cpu_size": "x"})},
     "not a size in GiB"),
    (GEMMA, {"kv_transfer_config": config("LMCacheConnectorV1")}, "how LMCache stores sliding windows"),
    (LLAMA, {"kv_transfer_config": config("LMCacheMPConnector")}, "--l1-size-gb is not in the JSON"),
    (LLAMA, {**native(), "kv_offloading_bytes": GIB}, "give one of them"),
    (LLAMA, {"engine": "sglang", "enable_hierarchical_cache": True, "hicache_size": 9, "hicache_ratio": 2.0},
     "give one"),
    (LLAMA, {"engine": "sglang", "enable_hierarchical_cache": True, "hicache_ratio": -1.0}, "not a positive"),
    (LLAMA, {"engine": "sglang", "enable_hierarchical_cache": True, "engine_version": "0.5.9",
             "hicache_ratio": 1.0}, "no host pool larger"),
    ("Qwen/Qwen3-8B", {"gpu": "gb10", "kv_offloading_bytes": 160 * GIB}, "takes 160.00 GiB of the memory"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "flags", "said"), REFUSED)
def test_unknown_kv_tier_setting_is_rejected_naming_it(plan_of, model, flags, said) -> None:
    with pytest.raises(TonnageError) as error:
        plan_of(model, **{"max_model_len": 8192, **flags})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-offloading-backend", "nvme"], "'nvme' is not one of native, lmcache"),
        (["--kv-offloading-backend", "lmcache"], "requires --kv-offloading-size"),
        (["--engine", "sglang", "--hicache-size", "5"], "requires --enable-hierarchical-cache"),
        (["--hicache-size", "5"], "requires --enable-hierarchical-cache"),
        (["--enable-hierarchical-cache"], "is a setting of sglang, not of vllm"),
    ],
)
def test_kv_tier_flag_without_its_engine_or_size_is_rejected(flags, said, capsys) -> None:
    assert run(["demo", "--gpu", "h100-80g", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
