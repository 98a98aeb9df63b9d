"""Fixtures for llm-comply, which runs in its own environment (``make test-compliance``), and for its server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import toolcalls
from serving import serving
from sharpened import sharpen

# The suites want answers that end by themselves, and send neither a temperature nor a limit. So the model is
# shown short answers, and its logits are scaled.
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
    folder = tmp_path_factory.mktemp("model")
    sharpen(folder)
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
