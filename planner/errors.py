"""Errors that a user can act on; each names the flag or field, its value and the valid values.

The command line prints `str(error)` and exits with 2. The server renders the error as an OpenAI error body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Maximum number of characters of an error text. Names in messages come from files and may be a megabyte long;
# Tonnage's own longest message has 700 characters.
LONGEST_TEXT = 4_000


def printable(text: str) -> str:
    """Return `text` on one line, without characters that a terminal or a log would interpret.

    Escape sequences, line ends and marks of the writing direction are escaped as in a Python string. A text
    longer than `LONGEST_TEXT` characters is cut.
    """
    if len(text) > LONGEST_TEXT:
        text = text[: LONGEST_TEXT - 3] + "..."
    return escaped(text)


def escaped(text: str) -> str:
    """Return `text` of any length on one line, without characters that a terminal would interpret."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name in `names` that is most similar to `word`, or None if none is similar.

    The comparison ignores case, dashes and underscores.
    """
    from difflib import get_close_matches  # lazy import, only for an error message

    plain = {_plain(name): name for name in names}
    wanted = _plain(word[:80])
    found = get_close_matches(wanted, plain, n=1)
    if not found and len(wanted) > 2:
        found = [name for name in plain if name.startswith(wanted)][:1]
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").lstrip("-")  # all options have a leading "--" in common


def did_you_mean(word: str, names: Iterable[str]) -> str | None:
    """Return the hint `did you mean X?`, or None; X is the name in `names` most similar to `word`."""
    close = nearest(word, names)
    return f"did you mean {close}?" if close else None


class TonnageError(Exception):
    """Base class of every error shown to a user without a traceback.

    Attributes:
        code: machine-readable error code in the OpenAI error body of the HTTP response.
        field: the config field, flag or body field at fault, or None.
        hint: advice for the user, such as a valid value, or None.
    """

    code: str = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        self.message = printable(message)
        self.field = None if field is None else printable(field)
        self.hint = None if hint is None else printable(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.message}{hint}"

    def __reduce__(self) -> tuple[object, ...]:  # errors are pickled when sent between processes
        return (_rebuild, (type(self), self.message, self.field, self.hint), self.__dict__)


def _rebuild(kind: type[TonnageError], message: str, field: str | None, hint: str | None) -> TonnageError:
    return kind(message, field=field, hint=hint)


class ModelNotFound(TonnageError):
    """Error for a name that is neither `demo` nor a folder, a file or a reachable hub id."""

    code = "model_not_found"


class HubUnreachable(ModelNotFound):
    """Error for a hub id whose hub does not answer, or whose access is disabled (HF_HUB_OFFLINE)."""


class UnsupportedArchitecture(TonnageError):
    """Error for a model, or a field of its config, that the planner does not support."""

    code = "unsupported_architecture"


class ConfigError(TonnageError):
    """Error for a config.json that is broken, incomplete or contradictory."""

    code = "invalid_model_config"


class CheckpointError(TonnageError):
    """Error for a safetensors or GGUF header that is truncated or invalid."""

    code = "invalid_checkpoint"


class DeploymentError(TonnageError):
    """Error for a flag that is out of range or contradicts another flag or the model."""

    code = "invalid_deployment"


class EngineRefusal(DeploymentError):
    """Error for a deployment that the engine itself rejects.

    Attributes:
        cause: key of the engine's own error message, which `Engine.error_message` returns.
        facts: name -> value of the numbers and words that the engine's message contains.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        hint: str | None = None,
        cause: str = "",
        facts: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message, field=field, hint=hint)
        self.cause, self.facts = cause, facts or {}


class NotSupported(DeploymentError):
    """Error for a deployment that the engine does not run on this device, however much memory it has."""


class DoesNotFit(TonnageError):
    """Error for a plan that needs more device memory than there is; the message gives both sizes."""

    code = "does_not_fit"
