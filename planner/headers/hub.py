"""The hub by the rules of huggingface_hub: its address, its cache on this machine, the token for it.

Rules: constants.py and utils/_auth.py of huggingface_hub 1.x. Where that is installed it is asked for tokens
that take more than reading: logins that expire, those of a CI job. ModelScope instead, where vLLM or SGLang is
told to load from there: config.py and _download.py of modelscope_hub 0.4.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tonnage.planner.errors import ModelNotFound

_HUB = "https://huggingface.co"
_MODELSCOPE = "https://modelscope.cn"
_SWITCHES = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")  # of vllm/envs.py and sglang/srt/environ.py

_explicit = False  # a token was given by flag; HF_HUB_DISABLE_IMPLICIT_TOKEN is about the others


def modelscope() -> bool:
    """Whether models come from ModelScope, by the engines' own switch."""
    return any(map(_on, _SWITCHES))


def _on(switch: str) -> bool:
    return os.environ.get(switch, "").strip().lower() in ("1", "true")


def endpoint() -> str:
    """``HF_ENDPOINT``, a mirror or a hub of one's own, without the slash at its end; else the hub. Of
    ModelScope, ``MODELSCOPE_ENDPOINT`` or its own, what all its models are below."""
    if not modelscope():
        return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    own = (os.environ.get("MODELSCOPE_ENDPOINT") or _MODELSCOPE).rstrip("/")
    return f"{own if '://' in own else f'https://{own}'}/models"


def tokens_page() -> str:
    """Where its users make tokens."""
    if modelscope():
        return f"{endpoint().removesuffix('/models')}/my/myaccesstoken"
    return f"{endpoint()}/settings/tokens"


def offline() -> bool:
    """Whether the hub is not to be asked."""
    return _true(os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"))


def hub_cache() -> Path:
    """The folder that snapshots are kept in."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(own) if own else _home() / "hub"


def modelscope_caches(repo: str, revision: str) -> tuple[Path, ...]:
    """Where ModelScope keeps a snapshot, as now and as before 1.38, which kept one revision."""
    base = _expanded(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope")
    org, _, name = repo.partition("/")
    older = Path("models", org, name.replace(".", "___"))
    return base / "models" / f"{org}--{name}" / "snapshots" / revision, base / older, base / "hub" / older


def token() -> str | None:
    """What ``--hf-token`` gave, ``HF_TOKEN``, or what ``hf auth login`` stored; None: there is none, or it is
    not to be sent unasked (``HF_HUB_DISABLE_IMPLICIT_TOKEN``).

    ModelScope's is ``MODELSCOPE_API_TOKEN``: what its login stores is a pickle, which is not read. Raises
    ModelNotFound, without the token in it, for one that cannot be read or is none.
    """
    if modelscope():
        return _checked(os.environ.get("MODELSCOPE_API_TOKEN", ""), "MODELSCOPE_API_TOKEN")
    if not _explicit and _true(os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return None
    path = _expanded(os.environ.get("HF_TOKEN_PATH") or str(_home() / "token"))
    known = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    traded = bool(os.environ.get("HF_OIDC_RESOURCE")) and not _explicit
    stored = not known and (path.exists() or "google.colab" in sys.modules)
    if (traded or stored) and (found := _by_library()):
        return _checked(found, "huggingface_hub")
    if known:
        return _checked(known, "HF_TOKEN")
    try:
        return _checked(path.read_text(), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ModelNotFound(f"the token of the hub cannot be read: {why}", field=str(path)) from None


def add_token_flag(parser: argparse._ActionsContainer) -> None:
    """``--hf-token``, of every command that takes a model. Its value goes where huggingface_hub looks for it,
    in an engine's process too, and not among what was parsed, which is printed and kept."""
    parser.add_argument(
        "--hf-token", action=_TokenFlag, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, metavar="TOKEN",
        help="for gated and private models of the hub (default: HF_TOKEN, else what 'hf auth login' stored, "
        "which others on this machine cannot read as they can a command line)",
    )  # fmt: skip


class _TokenFlag(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        global _explicit
        found = _checked(str(values), "--hf-token")
        if found is None:
            raise ModelNotFound("is empty", field="--hf-token")
        if modelscope():
            switch = next(filter(_on, _SWITCHES))
            raise ModelNotFound(
                f"is not sent to ModelScope, which {switch} asks for models", field="--hf-token",
                hint=f"set MODELSCOPE_API_TOKEN, or unset {switch}",
            )  # fmt: skip
        os.environ["HF_TOKEN"], _explicit = found, True


def _by_library() -> str | None:
    """None where huggingface_hub is not installed too."""
    try:
        from huggingface_hub import get_token  # only where somebody is logged in
    except ImportError:
        return None
    try:
        return get_token()
    except Exception as error:  # of kinds that are known only when it is there
        raise ModelNotFound(
            f"huggingface_hub has no token: {type(error).__name__}", field="model",
            hint="hf auth login, or set HF_TOKEN",
        ) from None  # fmt: skip


def _checked(text: str, source: str) -> str | None:
    """As _clean_token of utils/_auth.py. What no header may have http.client would refuse with the token in its
    words."""
    found = text.replace("\r", "").replace("\n", "").strip()
    if not found.isascii() or not found.isprintable() or " " in found:
        raise ModelNotFound("has characters that no token of the hub has", field=source)
    return found or None


def _home() -> Path:
    own = os.environ.get("HF_HOME")
    return _expanded(own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))


def _true(value: str | None) -> bool:
    return (value or "").upper() in ("1", "ON", "YES", "TRUE")
