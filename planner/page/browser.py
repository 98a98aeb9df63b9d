"""Python functions that the web page calls: the commands, and the entries of the page's lists.

The functions run in the browser and need only the standard library.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tonnage.planner.devices.catalogue import catalogue
from tonnage.planner.devices.prices import cost_of
from tonnage.planner.engines.registry import ENGINES, engine_of
from tonnage.planner.engines.vllm.versions import releases
from tonnage.planner.errors import CheckpointError, ModelNotFound, TonnageError
from tonnage.planner.flags import flags_of
from tonnage.planner.headers import partial
from tonnage.planner.headers.gguf import read_gguf
from tonnage.planner.headers.names import hub_model
from tonnage.planner.quantization.read import flag_formats
from tonnage.planner.source.resolve import forget, keep, resolve_model
from tonnage.planner.training.setup import TrainingSetup

_COMMANDS = {"plan": "tonnage.planner.command", "train": "tonnage.planner.training.command"}
# Values of --kv-cache-dtype that the web page offers for each engine; the flag accepts more.
_KV_CACHE_DTYPES = {
    "vllm": ("fp8", "bfloat16", "float16", "nvfp4", "turboquant_k8v4", "turboquant_4bit_nc"),
    "sglang": ("fp8_e5m2", "fp8_e4m3"),
    "llama.cpp": ("f16", "q8_0", "q4_0"),
    "hf": ("bfloat16", "float16", "float32"),
}
_remotes: dict[str, Any] = {}
_TRAINING = ("stack", "method", "precision", "optimizer", "checkpointing", "attention", "strategy")


def ask(command: str, argv: Iterable[str]) -> tuple[int, str, str]:
    """Run `tonnage plan` or `tonnage train` and return (exit code, standard output, standard error)."""
    argv = list(argv)
    if argv:
        # Keep the config and the header, so that a long header is parsed only once. If the model cannot be
        # read, the command that runs next reports the error.
        with suppress(TonnageError):
            keep(resolve_model(argv[0]))
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = import_module(_COMMANDS[command]).run(argv)
    return int(code), out.getvalue(), err.getvalue()


def choices() -> str:
    """Return as JSON the entries of each selection list on the web page, such as models and GPUs."""
    gpus = [{"name": gpu.name, "vendor": gpu.vendor, "memory_bytes": gpu.memory_bytes} for gpu in catalogue()]
    newest = {name: engine_of(name).newest for name in ENGINES}
    # An engine without version numbers is not listed.
    versions = {name: [".".join(map(str, version))] for name, version in newest.items() if any(version)}
    training = {name: flags_of(TrainingSetup)[name].choices for name in _TRAINING}
    return json.dumps(
        {
            "version": import_module("tonnage").__version__,
            "models": sorted(str(path.parent) for path in Path().glob("*/*/config.json")),
            "gpus": gpus,
            "engines": [name for name in ENGINES if name != "hf"] + ["hf"],
            "versions": versions | {"vllm": releases()},
            "quantization": sorted(flag_formats()),
            "kv_cache_dtype": _KV_CACHE_DTYPES,
            "dtype": ["bfloat16", "float16", "float32"],
            "training": training,
        }
    )


def forget_model(path: str) -> None:
    """Drop the cached config and headers of the model at `path`, whose files will be replaced."""
    forget(path)
    forget(str(Path(path).parent))


def register_partial(path: str, size: int) -> bool:
    """Make the first bytes of a checkpoint available to the planner; return whether they hold the whole header.

    A safetensors header states its length, so the web page always reads the whole header before it calls this
    function. A GGUF header does not state its length, so the page may have read only a part of it.

    Args:
        path: the file that holds these bytes.
        size: bytes of the whole checkpoint file.
    """
    partial.register(Path(path), size)
    if not path.endswith(".gguf"):
        return True
    try:
        read_gguf(Path(path))
    except CheckpointError as error:
        return "truncated" not in error.message
    return True


def hub(name: str, answers: Iterable[tuple[int, Iterable[tuple[str, str]], bytes, str]]) -> str:
    """Return as JSON the HTTP requests that the browser must make next for a hub model, or the outcome.

    The browser makes the requests and calls this function again with the answers. The JSON object has the key
    ``wanted`` (the next requests), ``model`` (the model's name, once config and headers are complete) or
    ``refused`` (the text of an error).

    Args:
        name: the model's name or address.
        answers: (status, headers, body, error) of each request that the previous call asked for; empty in the
            first call.
    """
    # lazy import, because the module loads an HTTP client, which is slow
    from tonnage.planner.page.hub import BrowserRemote, BrowserResponse

    given = [
        BrowserResponse(status, tuple(headers), bytes(body), failed)
        for status, headers, body, failed in answers
    ]
    try:
        if not given:
            if (model := hub_model(name)) is None:
                raise ModelNotFound(
                    "this is not the name of a hub model", field="model", hint='name it "org/name"'
                )
            if model.gguf:
                raise ModelNotFound(
                    "this page cannot read GGUF files of the hub; use tonnage plan", field="model"
                )
            _remotes[name] = BrowserRemote(model)
        reading = _remotes[name]
        done = reading.advance(given)
    except TonnageError as error:
        _remotes.pop(name, None)
        return json.dumps({"refused": str(error)})
    if done:
        del _remotes[name]
        return json.dumps({"model": str(reading.model), "note": reading.note})
    return json.dumps({"wanted": reading.wanted})


def costs(gpus: int) -> str:
    """Return as JSON the lowest listed hourly price in USD of `gpus` GPUs, and its source, by GPU type."""
    found = {gpu.name: cost_of(gpu.name, gpus) for gpu in catalogue()}
    return json.dumps({name: None if cost is None else [cost.usd, cost.source] for name, cost in found.items()})
