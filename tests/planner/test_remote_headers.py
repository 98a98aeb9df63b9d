"""Tests of headers read by range requests from a local HTTP server: requests, rejections, and no weights."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from http.server import ThreadingHTTPServer

import pytest
from hub_server import FileAnswers

from tonnage.planner.command import run
from tonnage.planner.errors import CheckpointError, ConfigError, ModelNotFound
from tonnage.planner.headers.names import HubModel
from tonnage.planner.headers.remote import Remote, fetch_checkpoint, fetch_config
from tonnage.planner.source.hub import shipped_models
from tonnage.planner.source.resolve import resolve_model


def safetensors(tensors: dict[str, list[int]], *, pad: int = 0) -> bytes:
    entries, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * shape[1]
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + b"\0" * at


class Handler(FileAnswers):
    def do_GET(self):
        server = self.server
        name = self.path.rpartition("/")[2]
        server.asked.append((self.path, self.headers.get("Range")))
        if name in server.redirects:
            self.send_response(302)
            self.send_header("Location", server.redirects[name])
            self.end_headers()
            return
        data = server.files.get(name)
        if data is None:
            self.send_error(404)
            return
        server.sent += self.send(data, server.ranges)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.redirects, server.asked, server.ranges, server.sent = {}, {}, [], True, 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    server.shutdown()
    server.server_close()


def test_sharded_hub_model_is_planned_from_headers_only(hub, tiny_llama):
    from tonnage.planner.deployment import Deployment
    from tonnage.planner.families.registry import build_architecture
    from tonnage.planner.planning.build import plan_source

    specs = [t for t in build_architecture(tiny_llama).tensors if t.is_parameter]
    shapes = {t.name: list(t.shape) if len(t.shape) == 2 else [t.shape[0], 1] for t in specs}
    matrices = {n: s for n, s in shapes.items() if s[1] > 1}
    norms = {n: [s[0]] for n, s in shapes.items() if s[1] == 1}
    first = safetensors(matrices)
    text = {
        n: {"dtype": "BF16", "shape": s, "data_offsets": [2 * 64 * i, 2 * 64 * (i + 1)]}
        for i, (n, s) in enumerate(norms.items())
    }
    body = json.dumps(text).encode()
    second = struct.pack("<Q", len(body)) + body + b"\0" * (2 * 64 * len(norms))
    index = {
        "weight_map": {**dict.fromkeys(matrices, "a.safetensors"), **dict.fromkeys(norms, "b.safetensors")}
    }
    hub.files = {
        "config.json": json.dumps(tiny_llama).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "a.safetensors": first,
        "b.safetensors": second,
    }
    source = resolve_model("org/tiny")
    assert {t.name for t in source.tensors} == set(shapes)
    plan = plan_source(source, Deployment(device_memory=1 << 34))
    assert plan.model.via == "headers"
    assert all(span is not None for path, span in hub.asked if path.endswith(".safetensors"))


def test_hub_model_with_a_modelopt_file_without_quantization_is_rejected_like_a_local_one(
    hub, tmp_path, tiny_llama
):
    files = {"config.json": json.dumps(tiny_llama).encode(), "hf_quant_config.json": b'{"producer": {}}'}
    hub.files = files
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for model in ("org/tiny", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"hf_quant_config\.json: the field `quantization` is missing"):
            resolve_model(model)


def test_long_safetensors_header_takes_two_range_requests(hub):
    big = safetensors({"w": [4096, 2048]}, pad=100_000)
    hub.files = {"model.safetensors": big}
    assert [t.shape for t in fetch_checkpoint(Remote(HubModel("org/m"))).tensors] == [(4096, 2048)]
    assert sum(path.endswith("model.safetensors") for path, _ in hub.asked) == 2
    assert hub.sent < 200_000 < len(big)


def test_redirected_truncated_or_oversized_hub_responses_are_rejected(hub):
    remote = Remote(HubModel("org/m"))
    hub.redirects = {"model.safetensors": "http://example.invalid/elsewhere"}
    with pytest.raises(CheckpointError, match=r"another host, example\.invalid"):
        fetch_checkpoint(remote)
    hub.redirects = {"config.json": f"http://localhost:{hub.server_port}/x/config.json"}
    with pytest.raises(CheckpointError, match="another host, localhost"):
        fetch_config(remote)
    hub.redirects = {}
    hub.files = {"model.safetensors": struct.pack("<Q", 10 << 30) + b"{}"}
    with pytest.raises(CheckpointError, match="claims a header of 10,737,418,240 bytes"):
        fetch_checkpoint(remote)
    hub.files = {"model.safetensors": safetensors({"w": [8, 8]})[:-8]}
    with pytest.raises(CheckpointError, match="truncated"):
        fetch_checkpoint(remote)
    hub.files = {"model.safetensors": safetensors({"w": [8, 8]})}
    hub.ranges = False
    with pytest.raises(CheckpointError, match="does not support range requests"):
        fetch_checkpoint(remote)
    hub.files = {"config.json": b" " * (17 << 20)}
    with pytest.raises(CheckpointError, match="at most 8,388,608 are read"):
        fetch_config(remote)
    hub.files = {"model.safetensors.index.json": json.dumps({"weight_map": {"w": "../../etc/passwd"}}).encode()}
    with pytest.raises(CheckpointError, match="points outside"):
        fetch_checkpoint(remote)


def test_redirect_to_same_host_is_followed(hub):
    hub.files = {"moved.json": b'{"model_type": "llama"}'}
    hub.redirects = {"config.json": "/org/m/moved.json"}
    assert fetch_config(Remote(HubModel("org/m"))) == {"model_type": "llama"}


def test_missing_hub_model_error_says_what_to_do(hub):
    with pytest.raises(ModelNotFound, match=r"org/nothing: the model has no config\.json.*local folder"):
        resolve_model("org/nothing")
    hub.shutdown()
    hub.server_close()
    refused = rf"cannot be fetched from {os.environ['HF_ENDPOINT']}: Connection refused \("
    with pytest.raises(ModelNotFound, match=refused):
        resolve_model("org/nothing")


def test_unreachable_hub_is_replaced_by_shipped_config(hub, capsys):
    hub.shutdown()
    hub.server_close()
    shipped = shipped_models()
    assert run(["Qwen/Qwen3-8B", "--gpu", "h100-80g", "--max-model-len", "8192"]) == 0
    out = capsys.readouterr().out
    note = (
        "the hub was not reached (Connection refused), so the config.json that Tonnage carries for "
        "Qwen/Qwen3-8B was used; the checkpoint's headers were not compared"
    )
    assert f"Note: {note}\n" in out
    source = resolve_model("Qwen/Qwen3-8B")
    assert source.config == json.loads(shipped["Qwen/Qwen3-8B"].read_text())
    assert run(["Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "--gpu", "h100-80g", "--max-model-len", "8192"]) == 0
    assert f"Note: {note}" in capsys.readouterr().out
    with pytest.raises(
        ModelNotFound, match=r"Qwen/Qwen3-14B: .*; without the hub, these can be planned: .*Qwen"
    ):
        resolve_model("Qwen/Qwen3-14B")
    with pytest.raises(ModelNotFound, match="cannot be fetched"):
        resolve_model("Qwen/Qwen3-8B@v2")


def test_shipped_config_is_used_offline_but_not_if_the_hub_answers(hub, monkeypatch):
    with pytest.raises(ModelNotFound, match=r"the model has no config\.json"):
        resolve_model("Qwen/Qwen3-8B")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in resolve_model("Qwen/Qwen3-8B").notes[0]


@pytest.mark.parametrize("address", ["http://127.0.0.1:abc", "http://[", "nowhere", "http://a b"])
def test_invalid_hf_endpoint_is_named_in_error(monkeypatch, tmp_path, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"cannot be fetched from \S+.*: .*HF_ENDPOINT"):
        resolve_model("org/name")
    if address == "http://[":
        with pytest.raises(ModelNotFound, match=r"HF_ENDPOINT: .* is no address"):
            resolve_model("https://huggingface.co/org/name")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"secret\r\n\r\n", "BadStatusLine"),
        (b"", "closed|reset|RemoteDisconnected"),
        (b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\nsecret\r\n", "IncompleteRead"),
    ],
)
def test_broken_http_answer_is_rejected(monkeypatch, answer, words):
    def twice(listening):
        for _ in range(2):
            found, _ = listening.accept()
            with found:
                found.recv(1 << 16)
                found.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=twice, args=(listening,), daemon=True)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        remote = Remote(HubModel("org/m"))
        for ask in (lambda: remote.read("config.json", 1 << 20), lambda: remote.header("model.safetensors")):
            with pytest.raises(ModelNotFound, match=words) as caught:
                ask()
            assert "secret" not in str(caught.value)
        thread.join()
