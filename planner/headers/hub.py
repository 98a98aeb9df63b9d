"""Settings of the model hub, by the rules of huggingface_hub: address, local cache and token.

The rules are those of huggingface_hub 1.x (constants.py, utils/_auth.py). Tokens that expire, and tokens of CI
jobs, come from this library if it is installed. If vLLM or SGLang is configured to load models from ModelScope,
the rules are those of modelscope_hub 0.4 (config.py, _download.py).
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
# Environment variables of vllm/envs.py and sglang/srt/environ.py.
_SWITCHES = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")

_explicit = False  # whether --hf-token was given; HF_HUB_DISABLE_IMPLICIT_TOKEN does not apply to it


def modelscope() -> bool:
    """Return whether models come from ModelScope, by the environment variables of vLLM and SGLang."""
    return any(map(_on, _SWITCHES))


def _on(switch: str) -> bool:
    return os.environ.get(switch, "").strip().lower() in ("1", "true")


def endpoint() -> str:
    """Return the model hub's address without a trailing slash: `HF_ENDPOINT` if set, else huggingface.co.

    For ModelScope, the address is `MODELSCOPE_ENDPOINT` or the public address, followed by `/models`.
    """
    if not modelscope():
        return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    own = (os.environ.get("MODELSCOPE_ENDPOINT") or _MODELSCOPE).rstrip("/")
    return f"{own if '://' in own else f'https://{own}'}/models"


def tokens_page() -> str:
    """Return the address of the page on which the hub's users create tokens."""
    if modelscope():
        return f"{endpoint().removesuffix('/models')}/my/myaccesstoken"
    return f"{endpoint()}/settings/tokens"


def offline() -> bool:
    """Return whether access to the hub is disabled (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    return _true(os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"))


def hub_cache() -> Path:
    """Return the local folder in which huggingface_hub keeps snapshots of models."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(own) if own else _home() / "hub"


def modelscope_caches(repo: str, revision: str) -> tuple[Path, ...]:
    """Return the folders in which the package modelscope may keep a snapshot of `repo`.

    They are the folder of current releases of the package, and two folders of its releases before 1.38, which
    kept only one revision of a model.
    """
    base = _expanded(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope")
    org, _, name = repo.partition("/")
    older = Path("models", org, name.replace(".", "___"))
    return base / "models" / f"{org}--{name}" / "snapshots" / revision, base / older, base / "hub" / older


def token() -> str | None:
    """Return the user's token for the model hub; None if there is none or it must not be sent implicitly.

    The token comes from `--hf-token`, `HF_TOKEN` or the file that `hf auth login` writes.
    `HF_HUB_DISABLE_IMPLICIT_TOKEN` disables the variable and the file. For ModelScope, only
    `MODELSCOPE_API_TOKEN` is read, because ModelScope's login stores the token in a pickle file, which would be
    unsafe to load.

    Raises:
        ModelNotFound: the token cannot be read or is invalid; the message does not contain it.
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
    """Add the option `--hf-token`, which every command that reads a model has.

    The token is stored in an environment variable, from which huggingface_hub reads it, even in the process of
    an engine. It is not in the parsed arguments, because these may be printed and stored.
    """
    parser.add_argument(
        "--hf-token", action=_TokenFlag, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, metavar="TOKEN",
        help="for gated and private models of the hub (default: HF_TOKEN, else what 'hf auth login' stored, "
        "which other users cannot read, unlike a command line)",
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
                f"is not sent to ModelScope, from which {switch} loads models", field="--hf-token",
                hint=f"set MODELSCOPE_API_TOKEN, or unset {switch}",
            )  # fmt: skip
        os.environ["HF_TOKEN"], _explicit = found, True


def _by_library() -> str | None:
    """Return the hub token that huggingface_hub finds, or None if this library is not installed."""
    try:
        from huggingface_hub import get_token  # optional package, needed only for some kinds of login
    except ImportError:
        return None
    try:
        return get_token()
    except Exception as error:  # catch all exceptions: huggingface_hub's exception types may be missing
        raise ModelNotFound(
            f"huggingface_hub has no token: {type(error).__name__}", field="model",
            hint="run hf auth login, or set HF_TOKEN",
        ) from None  # fmt: skip


def _checked(text: str, source: str) -> str | None:
    """Return a hub token without line ends, or None if it is empty, as huggingface_hub's _clean_token does.

    Characters that are invalid in an HTTP header are rejected here, because the error message of http.client
    would contain the token.
    """
    found = text.replace("\r", "").replace("\n", "").strip()
    if not found.isascii() or not found.isprintable() or " " in found:
        raise ModelNotFound("has characters that a hub token cannot have", field=source)
    return found or None


def _home() -> Path:
    own = os.environ.get("HF_HOME")
    return _expanded(own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))


def _true(value: str | None) -> bool:
    return (value or "").upper() in ("1", "ON", "YES", "TRUE")
