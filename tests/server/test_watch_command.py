"""The command ``tonnage watch``: its output, rejected arguments and exported metrics."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from pages import pages
from prometheus_client.parser import text_string_to_metric_families
from serving import PATIENCE
from watched import vllm

from tonnage.planner.errors import TonnageError
from tonnage.server.commands.watch import parser, run
from tonnage.server.watch.client import WatchError


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run([*arguments]) == 0
    return capsys.readouterr().out


def test_watch_once_prints_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with vllm("full") as server:
        out = told(capsys, server.url, "--once")
    assert out.startswith(f"vLLM 0.32.0 at {server.url}, serving demo\n")
    assert re.search(r"kv_pool +64,880,640 \(61\.9 MiB\) +64,880,640 \(61\.9 MiB\) +0\n", out)
    assert "7 running, 23 waiting; KV 100 %: 21 of 21 blocks of 128 tokens; room for 0 more" in out
    assert "activations" not in out


def test_watch_once_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    with vllm("after") as server:
        found = json.loads(told(capsys, server.url, "--once", "--json", "--gpu", "h100-80g"))
    assert found["server"] == "vLLM"
    assert found["plan"]["bytes"]["kv_pool"] == 64_880_640
    assert found["pool"] == {"num_blocks": 22, "usable": 21, "used": 0, "block_size": 128}
    assert found["headroom"]["requests"] == 5
    assert "per_second" not in found
    assert "cached" not in found["pool"]


def test_watch_failure_prints_one_line_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pages() as server:
        assert run([server.url, "--once"]) == 1
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("tonnage: ")
    assert out.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--interval", "0"], ["--interval", "nan"], ["--timeout", "x"], ["--port", "-1"], ["--port", "65536"],
        ["--host", "0.0.0.0"], ["--once", "--port", "0"], ["--api-key", "a\nb"], ["--engine", "vllm"],
        ["--gpu", "no-such", "--once"], ["--kv-unified", "--once"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_invalid_watch_arguments_are_rejected(arguments: list[str]) -> None:
    with vllm() as server, pytest.raises(TonnageError) as told:
        run([server.url, *arguments])
    assert not isinstance(told.value, WatchError)


def test_watch_help_lists_planner_flags() -> None:
    text = parser().format_help()
    assert "--gpu-memory-utilization" in text
    assert "--tensor-parallel-size" in text
    assert "--kv-unified" in text
    assert "--engine " not in text


@contextmanager
def watching(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tonnage.server.cli", "watch", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def scraped(url: str, until: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Return the samples of the metrics page by name and labels, once ``until`` accepts them."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=PATIENCE) as answer:
            text = answer.read().decode()
        found = {
            sample.name
            + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        if until(found):
            return found
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_watch_exports_metrics_before_during_and_after_server_lifetime() -> None:
    """Run the command in its own process, as under systemd, and end it by SIGTERM."""
    with vllm("full") as server:
        stored, server.paths = server.paths, {}
        with watching(server.url, "--port", "0", "--interval", "0.2", "--json", "--gpu", "h100-80g") as process:
            assert process.stderr is not None
            assert process.stdout is not None
            url = process.stderr.readline().split()[-1]
            found = scraped(url, lambda page: bool(page))
            assert found["tonnage_watch_up,model="] == 0
            assert json.loads(process.stdout.readline())["error"]["code"] == "watch_failed"
            server.paths = stored
            found = scraped(url, lambda page: page.get("tonnage_watch_up,model=demo") == 1)
            assert found["tonnage_engine_requests,model=demo,state=waiting"] == 23
            assert found["tonnage_pool_blocks,model=demo,state=used"] == 21
            assert found["tonnage_pool_blocks,model=demo,state=reserved"] == 1
            assert found["tonnage_pool_blocks,model=demo,state=free"] == 0
            assert "tonnage_pool_blocks,model=demo,state=cached" not in found  # vLLM does not tell
            assert found["tonnage_pool_bytes,model=demo,state=used"] == 21 * 2_949_120
            assert (
                found["tonnage_memory_planned_bytes,component=kv_pool,device=cuda:0,model=demo"] == 64_880_640
            )
            assert (
                found["tonnage_memory_measured_bytes,component=kv_pool,device=cuda:0,model=demo"] == 64_880_640
            )
            assert (
                found["tonnage_memory_measured_to_planned_ratio,component=kv_pool,device=cuda:0,model=demo"]
                == 1
            )
            assert found["tonnage_headroom_requests,model=demo"] == 0
            assert found["tonnage_preemptions_total,model=demo"] == 0
            server.paths = {}
            found = scraped(url, lambda page: page.get("tonnage_watch_up,model=demo") == 0)
            assert not any(name.startswith(("tonnage_pool", "tonnage_memory")) for name in found)
            process.send_signal(signal.SIGTERM)
            out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert errors == ""
    assert all(json.loads(line) for line in out.splitlines())


def test_watch_port_in_use_is_rejected() -> None:
    with vllm() as server, pytest.raises(TonnageError, match=r"^--port: cannot listen on"):
        run([server.url, "--port", server.url.rpartition(":")[2]])


# Where the tests run in the background (nohup) an interrupt is ignored, and so it is in whatever they start.
INTERRUPTED = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tonnage.server.cli import main
sys.exit(main())
"""


def test_watch_draws_screen_on_terminal() -> None:
    with vllm() as server:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, "watch", server.url, "--interval", "0.2"],
            stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while shown.count(b"7 running, 23 waiting") < 2:  # drawn again
                shown += os.read(ours, 65_536)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                while more := os.read(ours, 65_536):
                    shown += more
            except OSError:  # the other end is closed
                pass
            process.wait(PATIENCE)
            os.close(ours)
    assert process.returncode == 0
    assert b"Traceback" not in shown
    assert b"kv_pool" in shown
    assert "█".encode() in shown
