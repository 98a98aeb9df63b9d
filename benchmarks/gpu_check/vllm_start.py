"""Step `vllm`: vLLM's start-up terms against the plan, and its throughput with either scheduler."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tonnage.planner.fitlog.command import run as fit_log

from .models import Target, spec, write
from .rows import FAILED, OFF, OK, Row, skipped

_SCHEDULER = "tonnage.server.engines.vllm.scheduler.TonnageScheduler"
_SECONDS = 240  # of one vLLM: start, compilation and requests
_RESULT = "result "  # first word of the line with the figures; vLLM logs to the same stream
_REQUESTS, _PROMPT, _TOKENS = 128, 64, 64


def run(target: Target) -> Iterator[Row]:
    """Start vLLM twice in a process of its own; compare the first log with the plan, and the throughputs."""
    if find_spec("vllm") is None:
        yield skipped("vLLM", "needs vllm")
        return
    folder = write(spec("large", target.device), target.folder, "bfloat16")
    rates: dict[str, float] = {}
    for name, scheduler in (("own scheduler", ""), ("Tonnage's scheduler", _SCHEDULER)):
        log = target.folder / f"vllm-{'tonnage' if scheduler else 'own'}.log"
        try:
            found = _serve(target.device, folder, scheduler, log)
        except (subprocess.SubprocessError, ValueError) as error:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            yield Row(
                f"vLLM, {name}",
                "failed",
                verdict=FAILED,
                note=f"{type(error).__name__}; {' '.join(last)[:200]}",
            )
            continue
        rates[name] = found["tokens_per_second"]
        note = (
            "" if not scheduler else f"{rates[name] / rates.get('own scheduler', rates[name]):.3f} of its own"
        )
        yield Row(f"vLLM {found['version']}, {name}", rates[name], "tokens/s", note=note)
        if not scheduler:
            yield from _terms(log, folder, target)


def _serve(device: str, folder: Path, scheduler: str, log: Path) -> dict[str, Any]:
    """Run this module as a program, with its output in ``log``; return its last line."""
    command = [sys.executable, "-m", __name__, str(folder), "--device", device, "--scheduler", scheduler]
    path = os.pathsep.join([str(_checkout_packages(log.parent)), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w") as out:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            timeout=_SECONDS,
            check=True,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"PYTHONPATH": path},
        )
    with log.open("a") as out:
        out.write(done.stdout)
    found = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not found:
        raise ValueError("vLLM printed no result")
    answer: dict[str, Any] = json.loads(found[-1].removeprefix(_RESULT))
    return answer


def _checkout_packages(folder: Path) -> Path:
    """Return a folder from which vLLM's processes import the checkout as ``tonnage``."""
    root, made = Path(__file__).parents[2], folder / "packages"
    package = made / "tonnage"
    package.mkdir(parents=True, exist_ok=True)
    for source in (root / "planner", root / "cache", root / "server", root / "planner/_tonnage/__init__.py"):
        with contextlib.suppress(FileExistsError):
            (package / source.name).symlink_to(source)
    return made


def _terms(log: Path, folder: Path, target: Target) -> Iterator[Row]:
    """Yield each term of the start-up log beside its planned figure, as ``tonnage fit-log`` compares them."""
    device = ["--gpu", "cpu"] if target.device == "cpu" else ["--device-memory", str(target.memory)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = fit_log([str(log), "--model", str(folder), *device, "--json"])
    if code:
        yield Row("terms of vLLM's start", "not compared", note=err.getvalue().strip()[:300])
        return
    for compared in json.loads(out.getvalue())["logs"]:
        for name, term in compared["terms"].items():
            low, high = term["interval"] or (None, None)
            verdict = OK if term["verdict"] == "agrees" else OFF
            yield Row(
                f"vLLM's {name}", term["logged"], "", term["planned"], low, high, verdict, term["verdict"]
            )


def main() -> None:
    """Serve random prompts with vLLM and print the throughput as one line of JSON."""
    import time

    import vllm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device")
    parser.add_argument("--scheduler", default="")
    arguments = parser.parse_args()
    pool = {"kv_cache_memory_bytes": 64 << 20} if arguments.device == "cpu" else {"gpu_memory_utilization": 0.5}
    scheduler = {"scheduler_cls": arguments.scheduler} if arguments.scheduler else {}
    engine = vllm.LLM(arguments.model, skip_tokenizer_init=True, max_model_len=1024, **pool, **scheduler)
    params = vllm.SamplingParams(max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [3 + (at * 7 + of) % 400 for of in range(_PROMPT)]} for at in range(_REQUESTS)
    ]
    engine.generate(prompts[:4], params)
    begin = time.perf_counter()
    answers = engine.generate(prompts, params)
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    rate = made / (time.perf_counter() - begin)
    print(_RESULT + json.dumps({"version": vllm.__version__, "tokens_per_second": rate}))


if __name__ == "__main__":
    main()
