"""Tests of ``tonnage plan --trace``: requests with the lengths of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.cache.errors import CacheError
from tonnage.cache.replay.trace import read_trace
from tonnage.planner import plan
from tonnage.planner.errors import DeploymentError
from tonnage.server.cli import main
from tonnage.server.commands.trace_concurrency import run

TRACE = next((Path(__file__).resolve().parents[1] / "data" / "traces").glob("azure*.csv"))
FLAGS = ("demo", "--engine", "vllm", "--engine-version", "0.32.0", "--device-memory", "16GiB",
         "--kv-cache-memory-bytes", "512MiB")  # fmt: skip


def test_planned_concurrency_of_a_trace_weights_requests_by_their_number_of_steps(capsys):
    lengths = [(request.prompt_tokens, request.output_tokens) for request in read_trace(TRACE).requests]
    limit = sorted(map(sum, lengths))[len(lengths) * 3 // 4]  # as long as one of them
    assert run([*FLAGS, "--max-model-len", str(limit), "--trace", str(TRACE), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    same = plan("demo", engine="vllm", engine_version="0.32.0", device_memory=16 << 30,
                kv_cache_memory_bytes=512 << 20, max_model_len=limit)  # fmt: skip
    within = [pair for pair in lengths if sum(pair) <= limit]
    assert 0 < len(within) < len(lengths)
    blocks = [same.hold(*pair).blocks.fullest for pair in within]
    steps = sum(output for _, output in within)
    mean = sum(held * output for held, (_, output) in zip(blocks, within, strict=True)) / steps
    mix = out["trace"]
    assert (mix["requests"], mix["longer"]) == (len(within), len(lengths) - len(within))
    assert mix["blocks"] == pytest.approx(mean)
    assert mix["at_once"] == int(same.kv_cache.usable_blocks / mean)
    shares = [(found["share"], found["blocks"]["fullest"]) for found in out["requests"]]
    ranked = sorted(blocks)
    assert shares == [
        (word, ranked[-(-len(ranked) * percent // 100) - 1])
        for word, percent in (("half", 50), ("90 %", 90), ("99 %", 99), ("all", 100))
    ]


def test_plan_prints_requests_with_the_lengths_of_a_trace_beside_given_lengths(capsys):
    assert main(["plan", *FLAGS, "--trace", str(TRACE), "--limit", "20", "--request", "100+20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"Requests with the lengths of {TRACE.name} (20): about ") for line in lines)
    said = [line.partition(" tokens")[2][:20] for line in lines if line.startswith("Requests of")]
    assert len(said) == 5
    assert said[1].startswith(", half need no more")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--trace", "no/such/file.csv"), "No such file"),
        (("--trace", str(TRACE), "--sweep"), "--trace: needs a single plan; --sweep gives a table of plans"),
        (("--trace", str(TRACE), "--max-model-len", "16"), "above max_model_len 16"),
        (("--trace", str(TRACE), "--limit", "0"), "--limit"),
    ],
)
def test_invalid_trace_flags_are_rejected(flags, named):
    with pytest.raises((DeploymentError, CacheError), match=named):
        run([*FLAGS, *flags])
