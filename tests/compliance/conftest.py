"""Fixtures for llm-comply, which runs in its own environment (``make test-compliance``), and for its server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import toolcalls
from safetensors.torch import load_file, save_file
from serving import serving

from tonnage.server.demo.model import ensure_demo

# The suites want answers that end by themselves, and send neither a temperature nor a limit. So the model is
# shown short answers, and has logits so much larger that temperature 1 is greedy. By a power of two: exact in
# bfloat16.
SHARPER = 64.0
SHOWN = """\
{%- for asked, said in [
  ("Say hi.", "Hi!"), ("What is two and two?", "Four."), ("Where is Oslo?", "In Norway."),
  ("Count to three.", "1, 2, 3."), ("Say yes.", "Yes."), ("My name is Bob.", "Hello Bob!")
] %}<|im_start|>user
{{ asked }}<|im_end|>
<|im_start|>assistant
{{ said }}<|im_end|>
{% endfor %}
"""
MESSAGES = "{%- for m in messages %}"
TEMPLATE = toolcalls.TEMPLATE.replace(MESSAGES, SHOWN + MESSAGES)


@pytest.fixture(scope="session")
def llm_comply() -> Path:
    """Return the path of the llm-comply command, which make installs into its environment."""
    if "LLM_COMPLY" not in os.environ:
        pytest.skip("llm-comply has its own environment: make test-compliance")
    return Path(os.environ["LLM_COMPLY"]).absolute()


@pytest.fixture(scope="session")
def model(llm_comply: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the demo model with logits scaled by a power of two."""
    demo, folder = ensure_demo(), tmp_path_factory.mktemp("model")
    for file in demo.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    tensors = load_file(demo / "model.safetensors")
    tensors["model.norm.weight"] *= SHARPER
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def url(model: Path) -> Iterator[str]:
    """Start ``tonnage serve`` on the hf engine; yield its URL."""
    (model / "tools.jinja").write_text(TEMPLATE)
    flags = [
        *("--backend", "hf", "--served-model-name", "demo", "--chat-template", str(model / "tools.jinja")),
        *("--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "128MiB"),
    ]
    with serving(str(model), *flags) as address:
        yield address
