"""Tests of ``tonnage replay --tiers`` and ``--tier-curve`` as a user calls them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tonnage.server.cli import main
from tonnage.server.commands import replay

DATA = Path(__file__).parents[1] / "data"
AZURE = str(DATA / "traces" / "azure_conversation_300.csv")
MOONCAKE = str(DATA / "traces" / "mooncake_conversation_120.jsonl")


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Return a trace of ten long prompts that return after the pool has been filled, and flags to replay it."""
    config = json.loads((DATA / "configs" / "meta-llama__Meta-Llama-3.1-8B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = [
        {"timestamp": 2000 * i, "input_length": 4608, "output_length": 2,
         "hash_ids": list(range(100 * (i % 5), 100 * (i % 5) + 9))}
        for i in range(10)
    ]  # fmt: skip
    trace = tmp_path / "returning.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    return [str(trace), "--model", str(tmp_path), "--gpu", "h100-80g", "--max-model-len", "8192",
            "--kv-cache-memory-bytes", "2GiB"]  # fmt: skip


def test_replay_with_tiers_prints_hits_bytes_seconds_and_a_verdict(flags, capsys) -> None:
    assert main(["replay", *flags, "--tiers", "host=8GiB,disk=1TiB", "--disk-bandwidth", "5"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["verdict"].strip().startswith("Pays: mean time to first token -")
    assert "from host memory, 0.00 % from disk" in rows["tier hits"]
    assert main(["replay", *flags, "--tiers", "host=8GiB", "--tier-curve", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    tiers, curve = record["tiers"], record["tier_curve"]
    assert (tiers["pays"], tiers["loads"], tiers["setup"]["host_bandwidth"]) == (True, 5, 63e9)
    assert tiers["hit_tokens"] == 5 * 4607
    assert tiers["without"]["hit_rate"] < record["hit_rate"] + tiers["hit_tokens"] / (10 * 4608)
    # 131,072 bytes a token, 45 chunks of 512 tokens
    assert curve["knee_bytes"] == tiers["knee_bytes"] == 45 * 512 * 131_072
    assert curve["highest"] == pytest.approx(0.5)
    # the pool and 8 GiB hold all conversations, so that all chunks that return are hit
    assert curve["hicache_hit_rate"] == pytest.approx(0.5)
    assert main(["replay", *flags, "--tiers", "host=8GiB", "--tier-curve"]) == 0
    assert re.search("SGLang's HiCache +50.00 % with this pool and host tier", capsys.readouterr().out)


def test_lost_process_of_the_replay_without_tiers_is_reported(flags, capsys, monkeypatch) -> None:
    monkeypatch.setattr(replay, "_send_replay", lambda *_: os._exit(9))
    assert main(["replay", *flags, "--tiers", "host=8GiB"]) == 2
    assert "the process that replays the trace without tiers has ended" in capsys.readouterr().err


def test_replay_verdict_says_that_a_tier_smaller_than_the_working_set_does_not_pay(flags, capsys) -> None:
    assert main(["replay", *flags, "--tiers", "host=1GiB", "--tier-policy", "lru"]) == 0
    assert "Does not pay: " in (out := capsys.readouterr().out)
    assert "The size limits it: 0.00 %" in out
    assert main(["replay", *flags, "--tiers", "host=8GiB", "--host-bandwidth", "0.01"]) == 0
    assert "Costs: " in (out := capsys.readouterr().out)
    assert "The link limits it" in out


@pytest.mark.parametrize(
    ("config", "gpu", "more"),
    [
        ("meta-llama__Meta-Llama-3.1-8B", "h100-80g", []),
        ("meta-llama__Meta-Llama-3.1-8B", "h100-80g", ["--kv-cache-dtype", "fp8", "--block-size", "32"]),
        ("Qwen__Qwen2.5-3B", "h100-80g", ["-q", "fp8"]),  # 2 KV heads: four ranks hold each
        ("deepseek-ai__DeepSeek-V3", "h200-141g", []),
    ],
)
def test_replayed_kv_tier_of_eight_ranks_holds_as_many_tokens_as_planned(
    config, gpu, more, flags, tmp_path, capsys
) -> None:
    """Ranks divide or repeat KV heads, and hold equal MLA latents, which a tier keeps once."""
    (tmp_path / "config.json").write_text((DATA / "configs" / f"{config}.json").read_text())
    device = ["--gpu", gpu, "-tp", "8", "--max-model-len", "8192", *more]
    assert main(["plan", str(tmp_path), *device, "--kv-offloading-size", "64", "--json"]) == 0
    (tier,) = json.loads(capsys.readouterr().out)["tiers"]
    assert main(["replay", *flags[:3], *device, "--tiers", "host=64GiB", "--json"]) == 0
    setup = json.loads(capsys.readouterr().out)["tiers"]["setup"]
    assert setup["host_bytes"] // setup["token_bytes"] // 64 * 64 == tier["tokens"] // 64 * 64
    links = 1 if "DeepSeek" in config else 8  # bytes of a token on all ranks, in units of one rank's
    assert setup["host_bandwidth"] == 63e9 * links


def test_replay_of_the_learned_tier_policy_prints_its_hits_beside_the_optimum(flags, capsys) -> None:
    assert main(["replay", *flags, "--tiers", "host=8GiB", "--tier-policy", "learned", "--json"]) == 0
    tiers = json.loads(capsys.readouterr().out)["tiers"]
    assert (tiers["policy"], tiers["hit_rate_optimum"]) == ("learned", 0.5)
    assert 0.45 < tiers["hit_rate_with_tiers"] <= 0.5
    assert main(["replay", *flags, "--tiers", "host=1GiB", "--tier-policy", "lru"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert (
        rows["tier policy"].strip().startswith("lru: pool and tiers hit 0.00 % of prompt tokens; the optimum")
    )
    assert not rows["tier policy"].endswith(" 0.00 %")


def test_replay_page_names_the_knee_of_the_hit_rate_curve(flags, capsys, tmp_path: Path) -> None:
    page = tmp_path / "replay.html"
    assert main(["replay", *flags, "--tier-curve", "--html", str(page)]) == 0
    text = page.read_text()
    assert "Hit rate by size of pool and tiers" in text
    assert "knee: 2.81 GiB" in text  # 45 chunks of 512 tokens, 131,072 bytes a token
    assert main(["replay", *flags, "--html", str(page)]) == 0
    assert "knee: " not in page.read_text()
    capsys.readouterr()


REFUSED = [
    (["--tiers", "host"], "'host' is not NAME=SIZE"),
    (["--tiers", "hots=1GiB"], "did you mean host?"),
    (["--tiers", "host=1G"], "is not a size"),
    (["--tiers", "host=1GiB,host=2GiB"], "given twice"),
    (["--tiers", "disk=1TiB"], "a disk tier needs one in host memory before it"),
    (["--tiers", "host=1GiB,disk=1TiB"], "the speed of the disk is not known"),
    (["--tiers", "host=1MiB"], "hold no chunk"),
    (["--tiers", "host=1GiB", "--host-bandwidth", "-1"], "not a positive finite number"),
    (["--tier-policy", "arc"], "needs --tiers"),
    (["--disk-bandwidth", "5"], "needs --tiers"),
    (["--tiers", "host=1GiB", "--search-gpus"], "cannot be combined with --search-gpus"),
]


@pytest.mark.parametrize(("more", "said"), REFUSED)
def test_invalid_tier_flag_of_replay_is_rejected(flags, more, said, capsys) -> None:
    assert main(["replay", *flags, *more]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_replay_with_tiers_rejects_a_trace_without_hash_ids(flags, capsys) -> None:
    assert main(["replay", AZURE, *flags[1:], "--tiers", "host=1GiB"]) == 2
    assert "has no hash_ids" in capsys.readouterr().err


HYBRIDS = [
    ("google__gemma-3-27b-it", "sliding"),
    ("openai__gpt-oss-20b", "sliding"),
    ("meta-llama__Llama-4-Scout-17B-16E-Instruct", "chunked"),
    ("nvidia__Nemotron-H-56B-Base-8K", "state"),
    ("transformers-default__mamba", "state"),
]


@pytest.mark.parametrize(("config", "kind"), HYBRIDS)
@pytest.mark.parametrize("wanted", [["--tier-curve"], ["--tiers", "host=8GiB"]])
def test_replay_with_tiers_rejects_a_model_whose_layers_do_not_keep_every_token(
    config, kind, wanted, flags, tmp_path, capsys
) -> None:
    (tmp_path / "config.json").write_text((DATA / "configs" / f"{config}.json").read_text())
    rest = ["--model", str(tmp_path), "--gpu", "h200-141g", "-tp", "8", "--max-model-len", "8192"]
    assert main(["replay", MOONCAKE, *rest, *wanted]) == 2
    error = capsys.readouterr().err
    assert f"this model has {kind} layers" in error
    assert "tonnage plan with --kv-offloading-size" in error
