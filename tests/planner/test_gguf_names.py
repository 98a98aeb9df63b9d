"""Tests of GGUF as people name it: file types of a config, tags and links of the hub, and partial offload."""

from __future__ import annotations

import json
import threading
from http.server import ThreadingHTTPServer

import pytest
from gguf_files import llama_file
from hub_server import FileAnswers

from tonnage.planner import plan
from tonnage.planner.command import run
from tonnage.planner.errors import DeploymentError, ModelNotFound, UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.headers.gguf_types import FILE_TYPES, file_type, gguf_tensors
from tonnage.planner.headers.names import HubModel, hub_model
from tonnage.planner.source.resolve import resolve_model

# Sizes in GB that bartowski publishes for Llama-3.1-70B, read 2026-11-26 as transcribed at
# ozeki.chat/p_8590-understanding-ai-model-files.html. Types that an importance matrix changes are left out.
PUBLISHED = {
    "Q8_0": 74.98, "Q6_K": 57.89, "Q5_K_M": 49.95, "Q5_K_S": 48.66, "Q4_K_M": 42.52, "Q4_K_S": 40.35,
    "Q3_K_L": 37.14, "Q3_K_M": 34.27, "Q3_K_S": 30.91,
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_planned_sizes_of_gguf_file_types_equal_published_files(config_of, kind):
    """A file has about 8 MB of metadata besides its tensors."""
    tensors = gguf_tensors(build_architecture(config_of("meta-llama/Llama-3.1-70B-Instruct")), kind)
    size = sum(tensor.nbytes for tensor in tensors) / 1e9
    assert size == pytest.approx(PUBLISHED[kind] - 0.008, abs=0.006)


def test_gguf_file_types_are_recognized_in_model_names():
    assert file_type("q4_k_m") == file_type("Q4-K") == "Q4_K_M"
    assert file_type("int4") is file_type("fp8") is file_type("mxfp4") is None
    assert hub_model("unsloth/Qwen3-8B-GGUF:Q4_K_M") == HubModel("unsloth/Qwen3-8B-GGUF", "main", "Q4_K_M")
    assert hub_model("unsloth/Qwen3-8B-GGUF") == HubModel("unsloth/Qwen3-8B-GGUF", "main", "Q4_K_M")
    link = "https://huggingface.co/unsloth/Qwen3-8B-GGUF/blob/main/Qwen3-8B-Q5_K_M.gguf"
    assert hub_model(link) == HubModel("unsloth/Qwen3-8B-GGUF", "main", "Qwen3-8B-Q5_K_M.gguf")
    assert hub_model("Qwen/Qwen3-8B") == HubModel("Qwen/Qwen3-8B")


@pytest.mark.parametrize("kind", ["q4_k_m", "q8_0", "iq4_xs"])
def test_gguf_file_type_given_as_quantization_selects_the_llama_cpp_engine(config_of, folder_with, kind):
    folder = folder_with(config_of("Qwen/Qwen3-8B"))
    found = plan(folder, quantization=kind, gpu="rtx4090-24g", max_model_len=8192)
    assert found.deployment.engine == "llama.cpp"
    whole = sum(t.nbytes for t in gguf_tensors(build_architecture(config_of("Qwen/Qwen3-8B")), file_type(kind)))
    embedding = 151_936 * 4096 * {"q4_k_m": 4.5, "q8_0": 8.5, "iq4_xs": 4.25}[kind] / 8
    assert found.rank.weights_bytes == whole - embedding  # it stays on the host
    assert any("by llama.cpp's rules for each tensor" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("Qwen/Qwen3-8B", {"quantization": "q4_k_x"}, "'q4_k_x' is no GGUF file type"),
        ("Qwen/Qwen3-8B", {"quantization": "q4_k_m", "engine": "vllm"}, "which vllm does not keep"),
        ("Qwen/Qwen3-32B-FP8", {"quantization": "q4_k_m"}, "quantized already"),
        ("LiquidAI/LFM2-1.2B", {"quantization": "q4_k_m"}, "are not known: give the .gguf file"),
    ],
)
def test_gguf_file_types_that_are_not_supported_are_rejected(config_of, folder_with, name, flags, words):
    with pytest.raises((DeploymentError, UnsupportedArchitecture), match=words):
        plan(folder_with(config_of(name)), gpu="l4-24g", **flags)


def test_local_gguf_file_on_gpu_is_planned_for_llama_cpp(tmp_path, capsys):
    file = str(llama_file(tmp_path / "m.gguf"))
    assert run([file, "--gpu", "l4-24g"]) == 0
    out = capsys.readouterr().out
    assert "engine llama.cpp on l4-24g" in out
    assert "planned for llama.cpp, as the model is a GGUF file; --engine vllm plans for another engine" in out
    assert run([file, "--gpu", "l4-24g", "--serve-line"]) == 0
    assert capsys.readouterr().out.startswith(f"llama-server -m {file} ")
    assert run([file, "--gpu", "l4-24g", "--engine", "vllm"]) in (0, 1)
    assert "engine vllm" in capsys.readouterr().out


class Handler(FileAnswers):
    def do_GET(self):
        data = self.server.files.get(self.path.rpartition("/")[2])
        if data is None:
            self.send_error(404)
        else:
            self.send(data)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {}
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    server.shutdown()
    server.server_close()


def test_model_name_with_a_gguf_tag_or_link_reads_the_header_from_the_hub(hub, tmp_path, capsys):
    data = llama_file(tmp_path / "m.gguf").read_bytes()
    names = ["README.md", "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf"]
    hub.files = {"main?recursive=true": json.dumps([{"type": "file", "path": name} for name in names]).encode()}
    hub.files["m-Q4_K_M.gguf"] = data
    local = plan(str(tmp_path / "m.gguf"), engine="llama.cpp", gpu="l4-24g")
    link = "https://huggingface.co/org/m-GGUF/blob/main/m-Q4_K_M.gguf"
    for name in ("org/m-GGUF", "org/m-GGUF:q4_k_m", link):
        found = plan(name, gpu="l4-24g")
        assert found.deployment.engine == "llama.cpp"
        assert found.ranks == local.ranks
    assert run(["org/m-GGUF:Q4_K_M", "--gpu", "l4-24g", "--serve-line"]) == 0
    assert capsys.readouterr().out.startswith("llama-server -hf org/m-GGUF:Q4_K_M ")
    with pytest.raises(ModelNotFound, match=r"no GGUF file Q5_K_M \(it has Q4_K_M, Q8_0, UD-Q4_K_M\)"):
        resolve_model("org/m-GGUF:Q5_K_M")


def test_model_name_with_a_gguf_tag_uses_the_shipped_config_without_a_hub(hub):
    hub.shutdown()
    hub.server_close()
    found = plan("unsloth/Qwen3-8B-GGUF:Q4_K_M", gpu="rtx4090-24g", max_model_len=8192)
    same = plan("Qwen/Qwen3-8B", quantization="q4_k_m", gpu="rtx4090-24g", max_model_len=8192)
    assert found.ranks == same.ranks
    assert found.notes[1].startswith(
        "the hub was not reached, so Q4_K_M of the config.json that Tonnage carries"
    )
    with pytest.raises(ModelNotFound, match="cannot be fetched"):
        plan("unsloth/Qwen3-8B-GGUF:UD-Q4_K_XL", gpu="rtx4090-24g")


def test_partial_gpu_offload_divides_weights_and_kv_cache_by_layers(config_of, folder_with, capsys):
    folder = folder_with(config_of("Qwen/Qwen3-32B"))
    flags = {"quantization": "q4_k_m", "gpu": "rtx4080-16g", "max_model_len": 8192}
    whole = plan(folder, **flags)
    assert not whole.fits
    assert whole.advice[0].startswith("--n-gpu-layers ")
    count = int(whole.advice[0].split()[1].rstrip(":"))
    found = plan(folder, n_gpu_layers=count, **flags)
    assert found.fits
    assert not plan(folder, n_gpu_layers=count + 1, **flags).fits
    assert found.rank.kv_pool_bytes * 64 == whole.rank.kv_pool_bytes * (count - 1)
    assert plan(folder, n_gpu_layers=65, **flags).ranks == whole.ranks
    (part,) = (part for part in found.host.parts if part.name.startswith("KV cache of blocks"))
    assert part.value + found.rank.kv_pool_bytes == whole.rank.kv_pool_bytes
    line = [folder, "-q", "q4_k_m", "--gpu", "rtx4080-16g", "--max-model-len", "8192", "-ngl", str(count)]
    assert run([*line, "--serve-line"]) == 0
    assert f" -ngl {count}" in capsys.readouterr().out
    for wrong in (["--tensor-parallel-size", "2"], ["--engine", "vllm"]):
        assert run([*line, *wrong]) == 2
        assert "--n-gpu-layers" in capsys.readouterr().err


def test_every_supported_gguf_file_type_gives_a_plausible_model_size(config_of):
    architecture = build_architecture(config_of("Qwen/Qwen3-30B-A3B"))
    sizes = [sum(t.nbytes for t in gguf_tensors(architecture, kind)) for kind in FILE_TYPES]
    assert min(sizes) > 30e9 / 8 * 2.5
    assert max(sizes) == sizes[0]


def test_plan_table_compares_gguf_file_types(config_of, folder_with, capsys):
    folder = folder_with(config_of("Qwen/Qwen3-8B"))
    flags = ["--gpu", "rtx4090-24g,l4-24g", "--max-model-len", "8192"]
    assert run([folder, "-q", "q4_k_m,q8_0", *flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["quantization"], row["gpu"]) for row in rows] == [
        ("Q4_K_M", "rtx4090-24g"), ("Q4_K_M", "l4-24g"), ("Q8_0", "rtx4090-24g"), ("Q8_0", "l4-24g")
    ]  # fmt: skip
    for row in rows:
        alone = plan(folder, quantization=row["quantization"], gpu=row["gpu"], max_model_len=8192)
        assert (row["weights_bytes"], row["kv_pool_bytes"]) == (
            alone.rank.weights_bytes,
            alone.rank.kv_pool_bytes,
        )
    assert run([folder, "-q", "q4_k_m,q8_0", *flags]) == 0
    assert capsys.readouterr().out.count("Q4_K_M by llama.cpp's rules") == 1
