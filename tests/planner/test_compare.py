"""Tests of ``tonnage plan --compare`` against user-reported upgrades: direction, size, release and reason."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from html_pages import Document

from tonnage.planner.command import run
from tonnage.planner.engines.vllm.versions import _CHANGES, _WORDS

DATA = Path(__file__).parent.parent / "data"
EAGLE = {"architectures": ["Eagle3LlamaForCausalLM"], "num_hidden_layers": 1}
GEMMA = "configs/nvidia__Gemma-4-31B-IT-NVFP4.json"


@pytest.fixture
def folder(tmp_path):
    def make(file):
        shutil.copy(DATA / file, tmp_path / "config.json")
        return str(tmp_path)

    return make


def compared(capsys, model, since, until, *arguments):
    code = run([model, "--gpu", "h100-80g", "--compare", since, until, *arguments, "--json"])
    out = json.loads(capsys.readouterr().out)
    assert code == (0 if out["terms"]["fits"] == {"from": True, "to": True} else 1)
    return out


def ratio(out, term):
    return out["terms"][term]["to"] / out["terms"][term]["from"]


def reasons(out, version):
    (step,) = (step for step in out["steps"] if step["version"] == version)
    return " ".join(step["reasons"])


def test_vllm_0_17_has_a_lower_activation_peak_than_0_16(folder, capsys):
    """Qwen3-14B on an H100 has 5.64 GiB of activations under 0.16.0 and 2.23 under 0.17.0.

    The memory outside PyTorch doubled at 0.18.0 (llm-d-planner#205).
    """
    model = folder("startups/Qwen__Qwen3-14B.json")
    flags = ("--max-model-len", "8192", "--gpu-memory-utilization", "0.95")
    out = compared(capsys, model, "0.16.0", "0.17.0", *flags)
    assert ratio(out, "activation_bytes") == pytest.approx(2.23 / 5.64, abs=0.02)
    assert [step["version"] for step in out["steps"]] == ["0.17.0"]
    assert "sampler" in reasons(out, "0.17.0")
    out = compared(capsys, model, "0.17.0", "0.18.0", *flags)
    assert ratio(out, "framework_bytes") > 1.5
    assert "CUDA graphs" in reasons(out, "0.18.0")


def test_vllm_0_20_1_reports_more_pool_tokens_for_a_sliding_window_model(folder, capsys):
    """Gemma 4 31B in 4 bits on an A100 prints 9.5 times as many tokens for the same pool (vllm#43308)."""
    model = folder(GEMMA)
    flags = ("--gpu-memory-utilization", "0.9", "--max-model-len", "131072", "--gpu", "a100-80g")
    out = compared(capsys, model, "0.20.0", "0.21.0", *flags)
    assert ratio(out, "tokens") == pytest.approx(9.5, rel=0.05)
    assert ratio(out, "kv_pool_bytes") == pytest.approx(1, abs=0.01)
    assert "requests of max_model_len" in reasons(out, "0.20.1")


def test_vllm_0_26_reserves_two_batches_of_tokens_per_sliding_window(folder, capsys):
    """Gemma 4 with 49 GiB of KV cache and steps of 32,768 tokens needs 1.5 times the bytes per request.

    A start that succeeded under 0.25.1 fails (vllm#49878).
    """
    flags = (
        "--kv-cache-memory-bytes",
        "49GiB",
        "--max-num-batched-tokens",
        "32768",
        "--gpu",
        "rtx-pro-6000-96g",
    )
    out = compared(capsys, folder(GEMMA), "0.25.1", "0.26.0", *flags)
    assert 1.4 < ratio(out, "bytes_per_sequence") < 1.6
    assert "two batches" in reasons(out, "0.26.0")
    assert out["stops_with"]["from"] is None
    assert "larger than the available KV cache memory (49.0 GiB)" in out["stops_with"]["to"]


def test_vllm_0_20_uses_more_of_the_gpu_memory_and_subtracts_estimated_cuda_graphs(folder, capsys):
    """The default share rises from 0.9 to 0.92, and the estimated graphs reduce the pool (vllm#45178)."""
    model = folder("configs/meta-llama__Meta-Llama-3.1-8B.json")
    out = compared(capsys, model, "0.19.1", "0.20.0", "--max-model-len", "8192")
    assert out["terms"]["gpu_memory_utilization"] == {"from": 0.9, "to": 0.92}
    assert out["terms"]["cuda_graph_bytes"]["from"] == 0 < out["terms"]["cuda_graph_bytes"]["to"]
    same = compared(
        capsys, model, "0.19.1", "0.20.0", "--max-model-len", "8192", "--gpu-memory-utilization", "0.9"
    )
    assert ratio(same, "tokens") < 1 < ratio(out, "tokens")


def test_vllm_v1_rejects_context_that_v0_accepted(folder, capsys):
    """A 70B Llama on eight RTX 4090 at 0.95 starts with 116,160 tokens under 0.7.3 only (vllm#15617).

    Under 0.8.2 the log says "4.43 GB KV cache is needed, which is larger than the available KV cache memory
    (3.48 GB)". A shorter context then has no memory for 1,024 dummy requests.
    """
    model = folder("configs/meta-llama__Llama-3.1-70B-Instruct.json")
    flags = ("--gpu", "rtx-4090", "--tensor-parallel-size", "8", "--gpu-memory-utilization", "0.95")
    flags += ("--device-memory", "23.63GiB")  # with a driver of the versions' time (field_reports.jsonl)
    out = compared(capsys, model, "0.7.3", "0.8.2", *flags, "--max-model-len", "116160")
    assert out["terms"]["fits"] == {"from": True, "to": False}
    assert out["terms"]["max_num_seqs"] == {"from": 256, "to": 1024}
    assert out["terms"]["kv_pool_bytes"]["to"] == pytest.approx(3.48 * (1 << 30), abs=0.3 * (1 << 30))
    said = (
        "the models's max seq len (116160), (4.43 GB KV cache is needed, which is larger than the available KV"
    )
    assert said in out["stops_with"]["to"]
    told = reasons(out, "0.8.0")
    assert "1,024 sequences" in told
    assert "CUDA's context" in told
    # pull requests 16158 and 18974
    out = compared(capsys, model, "0.8.2", "0.9.1", *flags, "--max-model-len", "53008")
    assert out["terms"]["max_num_seqs"] == {"from": 1024, "to": 256}
    assert "no longer" in reasons(out, "0.9.1")
    assert ratio(out, "kv_pool_bytes") > 1
    for gpu, sequences in (("h100-80g", 1024), ("b200", 256)):  # H100 and H200 by their names
        out = compared(capsys, model, "0.8.4", "0.9.0", "--gpu", gpu, "--tensor-parallel-size", "8")
        assert out["terms"]["max_num_seqs"] == {"from": sequences, "to": 1024}


def test_vllm_0_26_counts_flashinfer_workspace_as_cuda_graphs(folder, tmp_path, capsys):
    """Qwen3.5-122B-A10B in 4 bits loses 17.9 % of its 1,489,281 tokens (vllm#50780).

    With steps of 32,768 tokens, 0.23 estimated 0.56 GiB of graphs and 0.26 estimated 4.2 GiB. A nightly build
    of 0.26.1 lost 23.7 % of the tokens.
    """
    model = folder("configs/nvidia__Qwen3.5-122B-A10B-NVFP4.json")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    steps = ("--max-num-batched-tokens", "32768", "--max-num-seqs", "16", "--max-model-len", "262144")
    flags = ("--gpu", "rtx-pro-6000-96g", "--kv-cache-dtype", "fp8", *steps)
    out = compared(capsys, model, "0.23.0", "0.26.0", *flags)
    captured = out["terms"]["cuda_graph_bytes"]
    assert captured["from"] == pytest.approx(0.56 * (1 << 30), rel=0.3)  # starts with few sequences differ
    assert captured["to"] == pytest.approx(4.2 * (1 << 30), rel=0.05)
    assert out["terms"]["tokens"]["from"] == pytest.approx(1_489_281, rel=0.03)
    assert -0.237 <= ratio(out, "tokens") - 1 <= -0.179
    assert "FlashInfer's workspace" in reasons(out, "0.26.0")
    # the second model runner allocates it with the pool, where nothing counts it
    out = compared(capsys, model, "0.28.0", "0.29.0", *flags)
    assert out["terms"]["cuda_graph_bytes"]["to"] < 1 << 29 < out["terms"]["cuda_graph_bytes"]["from"]
    full = ("--gpu-memory-utilization", "0.98", *flags)
    assert run([model, *full, "--engine-version", "0.29.0"]) == 0
    assert "attention's workspace), about 4.00 GiB, are captured outside" in capsys.readouterr().out
    # FlashAttention runs: a cache in the model's own dtype, a Hopper GPU
    for other in (("--kv-cache-dtype", "auto"), ("--gpu", "h100-80g")):
        out = compared(capsys, model, "0.23.0", "0.26.0", *flags, *other)
        assert ratio(out, "cuda_graph_bytes") == 1


def test_flashinfer_workspace_grows_with_max_num_batched_tokens(folder, capsys):
    """A hybrid of 64 layers on an RTX 5090 has 0.89 GiB of graphs with steps of 8,192 tokens (vllm#52872).

    With steps of 4,096, 3,072 and 2,048 tokens it has 0.52 GiB.
    """
    model = folder("configs/Qwen__Qwen3.5-27B.json")
    found = {}
    for tokens in (8192, 4096, 3072, 2048):
        step = ("--max-num-batched-tokens", str(tokens), "--max-num-seqs", "8", "--max-model-len", "4096")
        flags = ("--gpu", "rtx-5090", "--kv-cache-dtype", "fp8", "--quantization", "fp8", *step)
        out = compared(capsys, model, "0.26.0", "0.27.1", *flags)
        found[tokens] = out["terms"]["cuda_graph_bytes"]["to"]
    assert found[4096] == found[3072] == found[2048]
    assert found[8192] - found[4096] == pytest.approx((0.89 - 0.52) * (1 << 30), rel=0.02)


def test_vllms_second_model_runner_subtracts_no_cuda_graph_estimate_before_0_29(folder, capsys):
    """Dense models use the second runner from 0.25 on; its graphs did not reduce the pool (vllm#49224).

    NeMo-RL#3280 reports several GiB more KV cache under 0.25 than under 0.20.
    """
    model = folder("configs/meta-llama__Meta-Llama-3.1-8B.json")
    out = compared(capsys, model, "0.24.0", "0.25.1", "--max-model-len", "8192", "--gpu", "l40s")
    assert out["terms"]["cuda_graph_bytes"]["from"] == 0  # LlamaForCausalLM already used the second runner
    out = compared(capsys, model, "0.23.0", "0.25.1", "--max-model-len", "8192")
    assert out["terms"]["cuda_graph_bytes"]["from"] > 0 == out["terms"]["cuda_graph_bytes"]["to"]
    assert ratio(out, "kv_pool_bytes") > 1
    assert "does not estimate CUDA graphs" in reasons(out, "0.24.0")
    out = compared(capsys, model, "0.28.0", "0.29.0", "--max-model-len", "8192")
    assert out["terms"]["cuda_graph_bytes"]["from"] == 0 < out["terms"]["cuda_graph_bytes"]["to"]
    assert "estimates its CUDA graphs" in reasons(out, "0.29.0")
    mixture = folder("configs/Qwen__Qwen3.5-35B-A3B.json")
    out = compared(capsys, mixture, "0.24.0", "0.25.1", "--max-model-len", "8192", "--language-model-only")
    assert ratio(out, "cuda_graph_bytes") == 1


def test_vllm_0_28_enables_prefix_caching_for_hybrid_models(folder, capsys):
    model = folder("configs/Qwen__Qwen3.5-27B.json")
    flags = ("--tensor-parallel-size", "2", "--max-model-len", "16384")
    out = compared(capsys, model, "0.27.1", "0.28.0", *flags)
    assert out["terms"]["enable_prefix_caching"] == {"from": False, "to": True}
    assert ratio(out, "max_concurrency") < 1
    assert "prefix caching" in reasons(out, "0.28.0")


def test_vllm_version_decides_how_many_mamba_states_are_kept_per_cached_block(folder, capsys):
    """With prefix caching, 0.27 keeps one state per block of a prompt, 0.28 two states and 0.32 three."""
    model = folder("configs/nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json")
    flags = ("--max-model-len", "131072", "--enable-prefix-caching")
    out = compared(capsys, model, "0.27.1", "0.28.0", *flags)
    assert ratio(out, "max_concurrency") > 2
    assert "--mamba-cache-mode all" in reasons(out, "0.28.0")
    out = compared(capsys, model, "0.31.0", "0.32.0", *flags)
    assert ratio(out, "bytes_per_sequence") > 1
    assert "state of the prefill" in reasons(out, "0.32.0")
    asked = compared(capsys, model, "0.28.0", "0.31.0", *flags, "--mamba-cache-mode", "all")
    assert asked["terms"]["bytes_per_sequence"]["from"] > 2 * out["terms"]["bytes_per_sequence"]["from"]
    assert run([model, "--gpu", "h100-80g", "--engine-version", "0.32.0", "--mamba-cache-mode", "all"]) == 2
    assert "does not accept the value 'all' from 0.32 on" in capsys.readouterr().err


def test_vllm_0_33_changes_cublas_memory_and_mamba_cache_mode(folder, capsys):
    """The 32 MiB of cuBLAS precede the first snapshot, and --mamba-cache-mode has no effect any more."""
    model = folder("configs/meta-llama__Meta-Llama-3.1-8B.json")
    out = compared(capsys, model, "0.32.0", "0.33.0", "--max-model-len", "8192")
    activation = out["terms"]["activation_bytes"]
    assert activation["from"] - activation["to"] == 32 << 20
    assert ratio(out, "kv_pool_bytes") > 1
    said = reasons(out, "0.33.0")
    assert "cuBLAS" in said
    assert "--mamba-cache-mode all is removed (0.32), or the flag has no effect" in said
    assert run([model, "--gpu", "h100-80g", "--engine-version", "0.33.0", "--mamba-cache-mode", "align"]) == 0
    assert "--mamba-cache-mode has no effect from vLLM 0.33 on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("draft", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 131072}, 16384),
        # EAGLE's rotary table is extended, unless its RoPE type depends on the length
        ({**EAGLE, "max_position_embeddings": 2048}, 16384),
        ({**EAGLE, "max_position_embeddings": 2048, "rope_scaling": {
            "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024,
        }}, 2048),
    ],
)  # fmt: skip
def test_vllm_0_33_plan_limits_max_model_len_to_the_context_of_the_draft_model(
    draft, length, folder, tmp_path, capsys
):
    """The rule is VllmConfig._limit_max_model_len_to_draft."""
    model = folder("configs/meta-llama__Meta-Llama-3.1-8B.json")
    config = json.loads((DATA / "configs/meta-llama__Meta-Llama-3.1-8B.json").read_text())
    config.pop("rope_scaling", None)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**config, **draft}))
    flags = ("--max-model-len", "16384", "--speculative-model", str(tmp_path / "draft"))
    out = compared(capsys, model, "0.32.0", "0.33.0", *flags)
    assert out["terms"]["max_model_len"] == {"from": 16384, "to": length}
    assert "draft model's" in reasons(out, "0.33.0")
    assert run([model, "--gpu", "h100-80g", "--engine-version", "0.33.0", *flags]) == 0
    assert ("the draft's own, not 16,384" in capsys.readouterr().out) == (length < 16384)


def test_memory_changes_between_two_vllm_versions_are_listed_per_version_in_order_and_add_up(folder, capsys):
    model = folder("configs/meta-llama__Meta-Llama-3.1-8B.json")
    flags = ("--max-model-len", "8192")
    out = compared(capsys, model, "0.10.2", "0.32.0", *flags)
    steps = [step["version"] for step in out["steps"]]
    assert steps == sorted(steps, key=lambda version: tuple(map(int, version.split("."))))
    assert {"0.17.0", "0.20.0"} <= {*steps}
    for term in out["terms"]:  # the steps add up to the whole
        ends = [step["terms"][term] for step in out["steps"] if term in step["terms"]]
        if ends:
            assert ends[0]["from"] == out["terms"][term]["from"]
            assert ends[-1]["to"] == out["terms"][term]["to"]
            assert all(a["to"] == b["from"] for a, b in pairwise(ends))
        else:
            assert out["terms"][term]["from"] == out["terms"][term]["to"]
    back = compared(capsys, model, "0.32.0", "0.10.2", *flags)
    assert {term: (v["to"], v["from"]) for term, v in back["terms"].items()} == {
        term: (v["from"], v["to"]) for term, v in out["terms"].items()
    }
    assert [step["version"] for step in back["steps"]] == steps[::-1]


def test_version_comparison_shows_that_a_newer_vllm_drops_the_model_class(folder, capsys):
    """The output quotes the newer version's error for a removed model class."""
    model = folder("configs/baichuan-inc__Baichuan2-7B-Base.json")
    out = compared(capsys, model, "0.23.0", "0.24.0")
    assert out["stops_with"]["from"] is None
    assert "was supported in vLLM until v0.23.0" in out["stops_with"]["to"]


def test_html_page_of_a_version_comparison_equals_its_text_output(folder, capsys, tmp_path):
    model = folder("configs/meta-llama__Meta-Llama-3.1-8B.json")
    arguments = [model, "--gpu", "h100-80g", "--compare", "0.19.0", "0.20.0", "--max-model-len", "8192"]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "vllm 0.19.0 -> 0.20.0 on h100-80g" in shown
    assert "0.20.0: " in shown
    assert run([*arguments, "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == shown
    text = (tmp_path / "page.html").read_text()
    page = Document(text)
    assert (page.facts["engine"], page.facts["device"]) == ("vllm 0.19.0 and 0.20.0", "h100-80g")
    assert page.command.startswith("tonnage plan ")
    for cell in re.findall(r"\S+ (?:GiB|KiB|%)", shown):
        assert cell in text
    assert run([model, "--gpu", "h100-80g", "--compare", "0.20.0", "0.20.1", "--max-model-len", "8192"]) == 0
    assert "No release between changes this plan." in capsys.readouterr().out
    assert run([*arguments, "--csv"]) == 0
    assert capsys.readouterr().out.startswith("term,0.19.0,0.20.0,difference")
    for wrong, said in (
        (["--engine-version", "0.20.0"], "--compare: already names both versions"),
        (["--sweep"], "--compare"),
        (["--explain"], "--explain"),
        (["--engine", "llama.cpp"], "no rule of llama.cpp depends on its version"),
    ):
        assert run([*arguments, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert run([model, "--gpu", "h100-80g", "--compare", "0.20.0", "new"]) == 2
    assert "--compare" in capsys.readouterr().err


def test_every_change_between_vllm_versions_has_an_explanation():
    named = {name for _, changed in _CHANGES for name in changed}
    assert named == {*_WORDS}
