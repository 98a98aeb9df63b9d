"""``tonnage watch`` with servers that restart, disappear or misbehave."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pages import Stored, pages, recorded
from serving import PATIENCE
from watched import QWEN, VLLM, llama, look, vllm

from tonnage.planner.errors import TonnageError
from tonnage.server.watch import client as client_module
from tonnage.server.watch.client import Client, WatchError
from tonnage.server.watch.records import Counters
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.watcher import Watcher

# -- counters, restarts, and servers that come and go


def test_watch_takes_a_decreased_counter_for_a_server_restart() -> None:
    with vllm("after") as server:
        watcher = Watcher(Client(server.url), {}, None)
        watcher.observe()
        same = watcher.observe()
        assert same.change == Counters(*[0] * 8)
        assert same.restarts == 0
        server.paths["/metrics"] = Stored(recorded(VLLM, "metrics_idle.txt"))
        again = watcher.observe()
        assert again.change is None
        assert again.restarts == 1
        server.paths["/metrics"] = Stored(recorded(VLLM, "metrics_full.txt"))
        grown = watcher.observe()
    assert grown.change is not None
    assert grown.change.generation_tokens == 3373
    assert grown.restarts == 1


def test_replaced_server_on_same_port_is_detected(gguf: str) -> None:
    with vllm() as server, llama("split", "load") as other:
        watcher = Watcher(Client(server.url), {}, gguf)
        assert watcher.observe().facts.title == "vLLM"
        server.paths.clear()
        with pytest.raises(WatchError, match="is none of"):
            watcher.observe()
        server.paths.update(other.paths)
        found = watcher.observe()
    assert (found.facts.title, found.restarts) == ("llama.cpp", 1)


def test_watch_continues_when_restarted_server_has_unavailable_model() -> None:
    with vllm("after") as server:
        watcher = Watcher(Client(server.url), {}, None)
        watcher.observe()
        server.paths["/v1/models"] = Stored(recorded(VLLM, "models.json").replace('"demo"', '"/gone/model"'))
        server.paths["/metrics"] = Stored(recorded(VLLM, "metrics_idle.txt"))
        found = watcher.observe()
    assert found.planned is None
    assert found.measured == {}
    assert found.reading.blocks("usable") == 21
    assert found.headroom is None
    assert any("without a plan: --model" in note for note in found.notes)


def test_unsupported_model_is_watched_without_a_plan(tmp_path: Path) -> None:
    config = json.loads(QWEN.read_text()) | {"model_type": "never_seen", "architectures": ["NeverSeen"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with vllm() as server:
        found = look(server, str(tmp_path))
    assert found.planned is None
    assert any("without a plan" in note and "never_seen" in note for note in found.notes)
    assert found.reading.blocks("used") == 21


def test_counters_missing_in_one_reading_have_no_reported_increase() -> None:
    assert Counters(1, None, 3).since(Counters(1, 2, None)) == Counters(0)
    assert Counters(1).since(Counters(2)) is None


# -- what can go wrong on the way


def test_unreachable_server_is_reported() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(WatchError, match=r"no server at .*is it running"):
        Client(url).get("/metrics")


def test_unknown_server_type_is_reported() -> None:
    with (
        pages(metrics="up 1\n") as server,
        pytest.raises(WatchError, match="none of Tonnage, vLLM, SGLang, llama"),
    ):
        look(server)


@pytest.mark.parametrize("status", [401, 403])
def test_watch_error_for_a_missing_api_key_names_the_key_options(status: int) -> None:
    with pages(metrics=Stored("{}", status)) as server:
        with pytest.raises(WatchError, match="--api-key KEY, or TONNAGE_API_KEY"):
            look(server)
        with pytest.raises(WatchError):
            Client(server.url, api_key="secret").get("/metrics")
        assert server.asked[-1][1]["Authorization"] == "Bearer secret"
        assert "Authorization" not in server.asked[0][1]


def test_watch_reports_a_loading_server_as_not_ready() -> None:
    body = '{"error":{"message":"Loading model","code":503}}'
    with (
        pages(metrics=Stored(body, 503)) as server,
        pytest.raises(WatchError, match="not ready: Loading model"),
    ):
        look(server)


def test_redirect_is_not_followed() -> None:
    """A key must reach only the host that it was given for."""
    away = Stored("", 302, {"Location": "http://elsewhere.invalid/metrics"})
    with pages(metrics=away) as server, pytest.raises(WatchError, match=r"redirected to http://elsewhere\.inv"):
        look(server)


def test_closed_connection_and_malformed_metrics_are_reported() -> None:
    with pages(metrics=Stored(status=0)) as server:
        with pytest.raises(WatchError, match="is this the server's port"):
            look(server)
        server.paths["/metrics"] = Stored('vllm:num_requests_running{engine="0" 1\n')
        with pytest.raises(WatchError, match="not in Prometheus' text format"):
            look(server)
        server.paths["/metrics"] = Stored(b"\xff\xfe\x00" * 1000)
        with pytest.raises(WatchError, match="none of"):
            look(server)


def test_response_larger_than_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_PAGE_BYTES", 2**20)
    with pages(metrics="x" * 2**20) as server:
        assert len(Client(server.url).get("/metrics").text) == 2**20
        server.paths["/metrics"] = Stored("x" * (2**20 + 1))
        with pytest.raises(WatchError, match="longer than 1,048,576 bytes"):
            Client(server.url).get("/metrics")


@contextmanager
def dripping(first: bytes, drop: bytes) -> Iterator[str]:
    """Send ``first``, then ``drop`` every 50 ms until the client disconnects."""
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
def test_response_that_arrives_byte_by_byte_times_out(first: bytes, drop: bytes) -> None:
    with dripping(first, drop) as url, pytest.raises(WatchError, match=r"no complete response within 0\.5 s"):
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
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(TonnageError, match=r"^URL: "):
        Client(url)


def test_common_forms_of_a_server_url_are_normalized() -> None:
    for text in (
        "localhost:8000",
        "http://localhost:8000/",
        "http://localhost:8000/metrics",
        "localhost:8000/v1/",
    ):
        assert Client(text).url == "http://localhost:8000"
    assert Client("https://host/prefix/v1").url == "https://host/prefix"


def test_nan_negative_and_infinite_metric_samples_are_ignored() -> None:
    samples = Samples(
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\nvllm:kv_cache_usage_perc +Inf\n"
        'vllm:num_preemptions_total{engine="0"} 3\nvllm:num_preemptions_total{engine="1"} 4\nother 1\n'
    )
    assert samples.total("vllm:num_requests_running") is None
    assert samples.total("vllm:num_requests_waiting") is None
    assert samples.count("vllm:num_preemptions_total") == 7
    assert "other" not in samples
