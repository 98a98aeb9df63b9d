"""Tests of the page's hub button in headless Chromium, against local servers as huggingface.co and its storage.

The button reads what ``tonnage plan org/name`` reads, by CORS and range requests, and nothing else.
"""

from __future__ import annotations

import json
import ssl
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Sight, commanded
from hub_server import Hub, hub_server

from tonnage.planner.families.registry import build_architecture
from tonnage.planner.page.build import model_files
from tonnage.planner.quantization.read import read_quantization

INDEX = "model.safetensors.index.json"
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
FOUR_BITS = {"bits": 4, "group_size": 128}
BITS = {"BF16": 16, "F32": 32, "I32": 32, "F8_E4M3": 8}


def safetensors(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    spans, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = BITS[dtype] // 8
        for side in shape:
            size *= side
        spans[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at := at + size]}
    text = json.dumps(spans).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def checkpoint(config: dict[str, Any], shards: int = 1, **beside: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of a model; parts that its config stores quantized are packed."""
    read = config
    if "hf_quant_config" in beside:
        read = config | {
            "quantization_config": {"quant_method": "modelopt"} | beside["hf_quant_config"]["quantization"]
        }
    quantization, tensors = read_quantization(read, None), {}
    for spec in build_architecture(read).tensors:
        if not spec.is_parameter or spec.tied_to:
            continue
        found = quantization.format_of(spec)
        if found is None:
            tensors[spec.name] = ("BF16", list(spec.shape))
        elif found.kind.suffix is None:
            tensors[spec.name] = ("F8_E4M3", list(spec.shape))
            tensors[f"{spec.module}.weight_scale_inv"] = ("F32", [side // 128 for side in spec.shape])
        else:
            tensors[spec.module + found.kind.suffix] = (
                "I32",
                [side // (8 if at else 1) for at, side in enumerate(spec.shape)],
            )
    files = {f"{name}.json": json.dumps(content).encode() for name, content in beside.items()}
    files["config.json"] = json.dumps(config).encode()
    if shards == 1:
        return files | {"model.safetensors": safetensors(tensors)}
    names = list(tensors)
    parts = {f"model-{at + 1:05}-of-{shards:05}.safetensors": names[at::shards] for at in range(shards)}
    weights = {file: safetensors({name: tensors[name] for name in part}) for file, part in parts.items()}
    total = sum(len(content) - 8 - int.from_bytes(content[:8], "little") for content in weights.values())
    where = {name: file for file, part in parts.items() for name in part}
    files[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": where}).encode()
    return files | weights


SEES = model_files()["Qwen/Qwen3-VL-8B-Instruct/config.json"]
MODELS = {
    "one/file": checkpoint(TINY),
    "long/header": checkpoint(TINY | {"num_hidden_layers": 100}),
    "in/shards": checkpoint(TINY, 11, generation_config={}, tokenizer_config={}),
    "in/fp8": checkpoint(TINY | {"quantization_config": FP8}, 2),
    "in/gptq": checkpoint(
        TINY | {"quantization_config": {"quant_method": "gptq", "desc_act": False, "sym": True} | FOUR_BITS}
    ),
    "in/awq": checkpoint(
        TINY
        | {"quantization_config": {"quant_method": "awq", "zero_point": True, "version": "gemm"} | FOUR_BITS}
    ),
    "in/modelopt": checkpoint(TINY, hf_quant_config={"quantization": {"quant_algo": "FP8"}}),
    "with/pictures": {
        "config.json": SEES,
        "preprocessor_config.json": b'{"size": {"longest_edge": 1048576, "shortest_edge": 65536}}',
    },
    "no/weights": {"config.json": json.dumps(TINY).encode()},
    "index/alone": {
        name: content
        for name, content in checkpoint(TINY | {"num_hidden_layers": 10}, 70).items()
        if not name.endswith(".safetensors")
    },
    # rejected models
    "a/gguf": {"model-Q4_K_M.gguf": b"GGUF"},
    "no/config": {"config.json": b"{"},
    "cut/off": {name: content[:-8] for name, content in checkpoint(TINY).items()}
    | {"config.json": json.dumps(TINY).encode()},
    "a/shard-short": {name: content for name, content in checkpoint(TINY, 3).items() if "00002-of" not in name},
    "is/gated": checkpoint(TINY),
}
REFUSED = (
    "a/gguf",
    "no/config",
    "cut/off",
    "a/shard-short",
    "is/gated",
    "is/nowhere",
    "one/file@v9",
    "too/many",
    "is/down",
)
FLAGS = ["--gpu", "h100-80g", "--engine", "vllm", "--engine-version", "0.33.0", "--explain", "--json"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=huggingface.co",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with hub_server(tls) as found:
        filled(found)
        yield found


def filled(hub: Hub) -> None:
    hub.files = {(name, "main"): files for name, files in MODELS.items()}
    hub.files["in/shards", "v2"] = MODELS["one/file"]
    hub.gated, hub.renamed = {"is/gated"}, {"was/named": "in/shards"}
    hub.failing = {"too/many": (429, {"Retry-After": "55"}), "is/down": (503, {})}


@pytest.fixture
def hub_page(hub: Hub, site: str, launch: Callable[..., Any]) -> Iterator[Sight]:
    """Yield the page in a browser that resolves huggingface.co and its storage to local servers."""
    here, there = (url.rpartition(":")[2] for url in (hub.url, hub.storage))
    rules = f"MAP huggingface.co 127.0.0.1:{here}, MAP *.hf.co 127.0.0.1:{there}"
    running = launch(f"--host-resolver-rules={rules}", "--ignore-certificate-errors")
    before, hub.storage = hub.storage, "https://cas-bridge.xethub.hf.co"
    yield Sight(running.new_page(), site)
    hub.storage = before
    running.close()


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that runs the command against a hub of its own without TLS."""
    with hub_server() as plain:
        filled(plain)
        plain.storage = f"{plain.url}/api/resolve-cache/models"
        monkeypatch.setenv("HF_ENDPOINT", plain.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

        def ask(name: str) -> tuple[int, str, str]:
            code, out, err = commanded("plan", [name, *FLAGS], tmp_path)
            return code, out, err.replace(plain.url, "https://huggingface.co")

        yield ask


def press(sight: Sight, name: str) -> None:
    sight.page.fill("#model", name)
    sight.page.locator("#model").blur()
    sight.page.click("#hub")


def test_planner_pages_button_that_reads_a_hub_model_gives_the_same_plan_as_the_plan_command(
    hub_page: Sight, hub: Hub, run_command: Any
) -> None:
    """The output is equal to the byte; no token, no page address is sent, and no weight is read."""
    hub_page.open("?gpu=h100-80g&engine=vllm&engine-version=0.33.0&model=Qwen/Qwen3-8B").settle()
    assert hub.asked == []  # until the button is pressed
    named = [*(name for name in MODELS if name not in REFUSED), "in/shards@v2", "was/named"]
    found = {}
    for name in named:
        press(hub_page, name)
        assert hub_page.planned(name) == name
        code, out, err = run_command(name)
        assert (code, err) == (0, ""), err
        assert hub_page.page.evaluate("() => window.tonnage.out") == out, name
        found[name] = json.loads(out)["model"]["via"]
        assert hub_page.page.is_hidden("#hub")
    assert found["in/shards"] == found["long/header"] == found["in/gptq"] == "headers"
    assert found["index/alone"] == "index"  # 70 shards are too many for the command too
    everything = [*hub.asked, *hub.asked_of_storage]
    assert {token for _, token in everything} == {None}
    assert set(hub.cookies) == set(hub.referrers) == {None}
    read = {path.partition("?")[0].rpartition("/")[2] for path, _ in everything}
    assert {name for name in read if not name.startswith("model")} == {
        "config.json",
        "hf_quant_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    }
    press(hub_page, "https://huggingface.co/in/shards/tree/v2")  # an address of its page
    assert hub_page.planned("in/shards@v2")
    before = len(hub.asked)
    hub_page.page.goto(hub_page.url + "?model=in/fp8")  # a link alone requests nothing
    hub_page.refused("to read it from the hub")
    assert hub_page.page.is_visible("#hub")
    assert len(hub.asked) == before


def test_planner_pages_button_that_reads_a_hub_model_shows_the_same_errors_as_the_plan_command(
    hub_page: Sight, hub: Hub, run_command: Any
) -> None:
    hub_page.open()
    for name in REFUSED:
        press(hub_page, name)
        code, _, err = run_command(name)
        assert code == 2
        # the hub's CORS headers do not expose Retry-After to other hosts
        hub_page.refused(err.removeprefix("tonnage: ").strip().replace("again in 55 s", "again later"))
        assert "paste its config.json" in hub_page.page.inner_text("#status")
        assert hub_page.page.inner_text("#result") == ""  # another model's plan is removed
        assert f"model={name.split('@')[0].replace('/', '%2F')}" in hub_page.page.url


def test_hub_button_on_the_page_uses_the_index_if_the_hub_rejects_range_requests(
    hub_page: Sight, hub: Hub
) -> None:
    """The page reads the index instead, and says so."""
    hub_page.open()
    try:
        for hub.ranges, hub.readable, name, via in (
            (False, True, "in/shards", "index"),
            (True, False, "in/fp8", "index"),
            (False, True, "one/file", "adapter"),
        ):
            press(hub_page, name)
            hub_page.planned(name)
            assert hub_page.plan()["model"]["via"] == via
            words = hub_page.page.inner_text("#result")
            assert "planned from the index" in words if via == "index" else "config.json alone" in words
    finally:
        hub.ranges = hub.readable = True


def test_hub_button_on_the_page_reads_a_listed_model_from_the_hub(
    hub_page: Sight, hub: Hub, run_command: Any
) -> None:
    hub.files["Qwen/Qwen3-8B", "main"] = MODELS["in/shards"]
    hub_page.open().settle()
    assert hub_page.plan()["model"]["via"] == "adapter"
    hub_page.page.click("#hub")
    hub_page.wait("() => JSON.parse(window.tonnage.out).model.via === 'headers'")
    assert hub_page.plan()["model"]["parameters"] < 10_000_000


def test_late_hub_response_does_not_replace_a_newer_choice_of_model(hub_page: Sight, hub: Hub) -> None:
    hub_page.open()
    press(hub_page, "in/shards")
    hub_page.page.select_option("#known", "Qwen/Qwen3-4B")
    hub_page.planned("Qwen/Qwen3-4B")
    hub_page.settle()
    assert hub_page.plan()["model"]["id"] == "Qwen/Qwen3-4B"
