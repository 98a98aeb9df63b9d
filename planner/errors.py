"""Errors a user can act on. Each names the field, the value and what would be right.

The command line prints ``str(error)`` and exits with 2; the server renders it as an OpenAI error body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Names in messages come from files and may be a megabyte long; the longest sentence of our own has 700
# characters.
LONGEST_TEXT = 4_000


def printable(text: str) -> str:
    """``text`` on one line: what a terminal or a log would act on (escape sequences, line ends, marks of the
    direction of writing) is written as Python writes it, and what is longer than `LONGEST_TEXT` is cut."""
    if len(text) > LONGEST_TEXT:
        text = text[: LONGEST_TEXT - 3] + "..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``word`` probably means, whatever its case, dashes and underscores."""
    from difflib import get_close_matches  # only for a wrong word

    plain = {_plain(name): name for name in names}
    wanted = _plain(word[:80])
    found = get_close_matches(wanted, plain, n=1)
    if not found and len(wanted) > 2:
        found = [name for name in plain if name.startswith(wanted)][:1]
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").lstrip("-")  # equal beginnings would make all options near


def did_you_mean(word: str, names: Iterable[str]) -> str | None:
    """A hint: ``did you mean X?``; None where none of ``names`` is near."""
    close = nearest(word, names)
    return f"did you mean {close}?" if close else None


class TonnageError(Exception):
    """Base of every error shown to a user; never a traceback.

    ``code`` is the machine-readable string of the OpenAI envelope, ``field`` the config field, flag or
    body field at fault, ``hint`` what to do next.
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

    def __reduce__(self) -> tuple[object, ...]:  # crosses the engine's process border
        return (_rebuild, (type(self), self.message, self.field, self.hint), self.__dict__)


def _rebuild(kind: type[TonnageError], message: str, field: str | None, hint: str | None) -> TonnageError:
    return kind(message, field=field, hint=hint)


class ModelNotFound(TonnageError):
    """The name is neither ``demo``, a folder, a file nor a reachable hub id."""

    code = "model_not_found"


class UnsupportedArchitecture(TonnageError):
    """The model, or a field of its config, is not understood: refused by name, never guessed."""

    code = "unsupported_architecture"


class ConfigError(TonnageError):
    """config.json is broken, incomplete or contradicts itself."""

    code = "invalid_model_config"


class CheckpointError(TonnageError):
    """A safetensors or GGUF header is truncated, lies or is not what it claims to be."""

    code = "invalid_checkpoint"


class DeploymentError(TonnageError):
    """A flag is out of range or contradicts another one or the model."""

    code = "invalid_deployment"


class EngineRefusal(DeploymentError):
    """The engine itself refuses: ``cause`` and ``facts`` find the sentence of its version (Engine.sentence)."""

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
    """The engine does not run this on that device, whatever memory there is."""


class DoesNotFit(TonnageError):
    """The plan does not fit into the memory; the message carries the numbers."""

    code = "does_not_fit"
