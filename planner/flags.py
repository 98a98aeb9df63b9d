"""Declaration of flags as dataclass fields, and the options, checks and settings made from them.

    max_model_len: int | None = flag(None, "longest sequence", group="model")

This declaration gives every command its option (`--max-model-len`) with parser and help text. It also gives the
server its setting and environment variable. A value that a Python caller passes is checked by the same
declaration. A default of None means that the engine chooses. `tonnage.planner.planning.deployment` and
`tonnage.planner.training.setup` check a value against other flags and the model.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.planner.errors import DeploymentError, did_you_mean
from tonnage.planner.model.dtypes import SPELLINGS
from tonnage.planner.units import MAX_BYTES, GiB, MiB, parse_count, parse_size

MAX_COUNT = 1 << 31
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "tuple[str, ...]": (tuple,), "str": (str,),
}  # fmt: skip
# Type annotation -> how error messages describe its values. For other types, messages use the flag's metavar.
_WORDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "tuple[str, ...]": "a list of texts",
    "str": "text", "Path": "the path of a file",
}  # fmt: skip
_UNITS = {"GiB": GiB, "MiB": MiB}  # Unit of the option's value -> its bytes; the dataclass field holds bytes.
_METAVARS = {"bytes": "SIZE", "GiB": "GIB", "MiB": "MIB", "share": "SHARE", "seconds": "SECONDS"}


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    unit: str = "",
    metavar: str = "",
    choices: tuple[str, ...] = (),
    least: int = 1,
    most: int = MAX_COUNT,
    needs: str = "",
    engine: str = "",
    option: str = "",
    short: str = "",
    spellings: tuple[tuple[str, str], ...] = (),
    secret: bool = False,
    hint: str | None = None,
    read: Callable[[str, str], Any] | None = None,
) -> Any:
    """Declare a dataclass field as a flag.

    Args:
        default: value of the field when the flag is not given.
        help: text of `--help`.
        group: heading of `--help` under which the option stands.
        unit: `bytes`, `GiB` or `MiB` (unit of the option; the field is in bytes), `share` (a fraction) or
            `seconds`. A fraction must be above 0 and at most 1; if `least` is 0, it must be at least 0 and
            below 1. Seconds must be above 0; if `least` is 0, 0 is valid too. An integer without a unit is a
            count.
        metavar: placeholder of the value in `--help`.
        choices: all valid values.
        least: smallest valid count.
        most: largest valid count.
        needs: field name of another flag without which this flag has no effect.
        engine: the engines that support the flag, separated by ", "; empty means all engines.
        option: name of the command-line option if it differs from the field's name.
        short: short form of the option, as in vLLM, for example `-tp`.
        spellings: (lower-case text, value) of other spellings, for a flag without `choices`.
        secret: whether the value must not be printed.
        hint: valid values, for error messages.
        read: function (text, field name) -> value, for a flag whose type and unit do not determine a parser.

    Returns:
        A dataclass field with these values as its metadata.
    """
    rest = {
        "help": help, "group": group, "unit": unit, "metavar": metavar, "choices": choices, "least": least,
        "most": MAX_BYTES if unit in ("bytes", *_UNITS) else most, "needs": needs, "engine": engine,
        "option": option, "short": short, "spellings": spellings, "secret": secret, "hint": hint,
        "reader": read,
    }  # fmt: skip
    return field(default=default, metadata=rest)


# Size fields for which a plain number below `_LEAST_MEMORY` is an error: the user meant GiB, not bytes.
_MEMORIES = ("device_memory", "device_memory_used", "kv_cache_memory_bytes")
_LEAST_MEMORY = 1_000


@dataclass(frozen=True, slots=True)
class Flag:
    """The declaration of one command-line flag, read from the dataclass field that declares it with `flag`.

    Attributes:
        kind: the type annotation of the field without `| None`, as text.
        optional: whether the annotation includes None, which means that the engine chooses.
    """

    name: str
    kind: str
    optional: bool
    default: Any
    help: str
    group: str
    unit: str
    metavar: str
    choices: tuple[str, ...]
    least: int
    most: int
    needs: str
    engine: str
    option: str
    short: str
    spellings: tuple[tuple[str, str], ...]
    secret: bool
    hint: str | None
    reader: Callable[[str, str], Any] | None

    def read(self, text: str, field: str | None = None) -> Any:
        """Parse the text of a command line or environment variable as a value of the field.

        Args:
            text: the text to parse.
            field: name of the option or variable for error messages; the option by default.

        Raises:
            DeploymentError: the text is not a valid value.
        """
        field = field or self.option
        if self.reader is not None:
            value = self.reader(text, field)
        elif self.unit == "bytes":
            value = parse_size(text, field)
            if text.isdecimal() and value < _LEAST_MEMORY and self.name in _MEMORIES:
                raise DeploymentError(
                    f"{text[:40]!r} is {value:,} bytes", field=field, hint=f"write {text[:40]}GiB for gibibytes"
                )
        elif self.kind == "int" and not self.unit:
            value = parse_count(text, field, least=self.least)
        elif self.kind in ("int", "float"):
            value = _number(text, field)
            if self.unit in _UNITS:
                if not 0 <= value < self.most // _UNITS[self.unit]:
                    raise DeploymentError(f"{text!r} is not a size in {self.unit}", field=field)
                value = int(value * _UNITS[self.unit])
        elif self.kind == "tuple[str, ...]":
            value = tuple(part.strip() for part in text.split(",") if part.strip())
            if self.secret and not value:  # An empty API key list would turn off authentication.
                raise DeploymentError("is empty", field=field, hint="leave it out to have none")
        elif self.kind == "bool":
            if text not in ("true", "false"):
                raise DeploymentError(f"{text[:40]!r} is not true or false", field=field)
            value = text == "true"
        elif self.kind == "Path":
            value = Path(text)
        else:
            value = self.canonical(text)
        self.check(value, field)
        return value

    def canonical(self, text: str) -> str:
        """Return the canonical spelling of the flag's value `text`, such as float16 for `FP16`.

        Unknown text is returned unchanged.
        """
        if self.choices:
            word = text.strip().lower()
            same = next((names for names in SPELLINGS if word in names), frozenset((word,)))
            return next((choice for choice in self.choices if choice in same), text)
        if self.spellings:
            usual = dict(self.spellings)
            # `text` may hold several values separated by commas.
            words = [word.strip().lower() for word in text.split(",")]
            return ",".join(usual.get(word, word) for word in words)
        return text

    def check(self, value: object, field: str | None = None) -> None:
        """Raise DeploymentError if `value` has the wrong type, is out of range or not among the choices."""
        field = field or self.option
        if value is None and self.optional:
            return
        wrong, hint = self._wrong(value), self.hint
        if wrong and self.choices and isinstance(value, str):
            other = self.canonical(value)
            usual = (
                *self.choices,
                *(name for names in SPELLINGS for name in names if self.canonical(name) != name),
            )
            hint = f"did you mean {other}?" if other in self.choices else did_you_mean(value, usual) or hint
        if wrong and self.unit == "share" and isinstance(value, int | float) and 1 < value <= 100:
            hint = hint or f"{value:g} % is {value / 100:g}"
        if wrong:
            raise DeploymentError(
                f"{'it' if self.secret else as_written(value)} is not {wrong}", field=field, hint=hint
            )

    def _wrong(self, value: Any) -> str | None:
        """Return a description of the flag's valid values if `value` is invalid, else None."""
        if self.choices and value not in self.choices:
            return f"one of {', '.join(self.choices)}"
        if not self._is_of_kind(value):
            return _WORDS.get(self.kind, self.metavar or "text")
        if value == "":
            return "a value"
        if self.kind == "int" and not self.least <= value <= self.most:
            return f"an integer from {self.least} to {self.most:,}"
        if value == () and self.default != ():
            return "a name or several"
        if self.unit == "seconds" and not (0 < value < float("inf") or value == self.least == 0):
            return "a time in seconds"
        if self.unit == "share" and self.least == 0 and not 0 <= value < 1:
            return "in [0, 1)"
        if self.unit == "share" and self.least and not 0 < value <= 1:
            return "in (0, 1]"
        return None

    def _is_of_kind(self, value: Any) -> bool:
        if isinstance(value, bool):
            return self.kind == "bool"
        if self.kind in _TYPES:
            whole = isinstance(value, _TYPES[self.kind])
            return whole and (self.kind != "tuple[str, ...]" or all(isinstance(part, str) for part in value))
        if self.kind == "Path":
            return hasattr(value, "__fspath__")
        if self.reader is not None and not isinstance(value, str):
            return bool(value.__class__.__name__ == self.kind)
        return isinstance(value, str)

    @property
    def help_line(self) -> str:
        """Return the text that `--help` prints for the flag, with its choices and its default."""
        text = f"{self.engine}: {self.help}" if self.engine else self.help
        if self.choices and self.metavar:
            text += f": {', '.join(self.choices)}"
        if self.default in (None, ()) or self.kind == "bool" or "default:" in text:
            return text
        shown = self.default
        if isinstance(shown, int) and shown >= 10_000:
            shown = f"{shown:,}"
        elif isinstance(shown, float):
            shown = f"{shown:g}"
        return f"{text} (default: {shown})" if text else f"default: {shown}"

    def add_to(self, parser: argparse._ActionsContainer, default: Any = None) -> None:
        """Add the flag's option to a parser, which stores `default` if the command line lacks the option."""
        names = (self.option, self.short) if self.short else (self.option,)
        parsing: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if self.kind != "bool":
            metavar = self.metavar or "|".join(self.choices) or _METAVARS.get(self.unit)
            if not metavar:
                metavar = "N" if self.kind == "int" else self.name.rsplit("_", 1)[-1].upper()
            parsing = {"type": self.read, "metavar": metavar}
        parser.add_argument(*names, dest=self.name, default=default, help=self.help_line, **parsing)


@cache
def flags_of(record: type) -> Mapping[str, Flag]:
    """Return a dict, in field order, from field name to `Flag` for the fields of the dataclass `record`."""
    found = {}
    for declared in fields(record):
        if rest := declared.metadata:
            name, kind = declared.name, str(declared.type)
            plain = kind.removesuffix(" | None")
            option = rest["option"] or "--" + name.replace("_", "-")
            found[name] = Flag(name, plain, plain != kind, declared.default, **{**rest, "option": option})
    return found


def add_flags(parser: argparse._ActionsContainer, record: type, names: Iterable[str]) -> None:
    """Add command-line options to a parser, one for each field in `names` of the dataclass `record`."""
    for name in names:
        flags_of(record)[name].add_to(parser)


def add_groups(
    parser: argparse.ArgumentParser, record: type, names: Iterable[str] | None = None, default: Any = None
) -> None:
    """Add the options of a dataclass's flags to a parser, under the headings of their groups.

    Args:
        parser: the parser to extend.
        record: the dataclass whose fields declare the flags.
        names: fields to add; None adds all.
        default: value that the parser stores for an option missing from the command line.
    """
    groups = {str(group.title): group for group in parser._action_groups}
    wanted = None if names is None else set(names)
    for name, found in flags_of(record).items():
        if wanted is not None and name not in wanted:
            continue
        if found.group not in groups:
            groups[found.group] = parser.add_argument_group(found.group)
        found.add_to(groups[found.group], default)


def given(arguments: argparse.Namespace, record: type) -> dict[str, Any]:
    """Return a dict from field name to value of the flags of `record` that were given on the command line."""
    values = vars(arguments)
    return {name: values[name] for name in flags_of(record) if values.get(name) is not None}


def check_values(record: Any) -> None:
    """Raise DeploymentError for the first flag of the dataclass instance `record` whose value is invalid."""
    for name, found in flags_of(record.__class__).items():
        value = getattr(record, name)
        if value is not found.default:  # Default values are valid, so skip their check to save time.
            found.check(value)


def as_written(value: object) -> str:
    """Return a value as text in settings-file syntax (`true`, not `True`), for error messages."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = [*value]
    return (repr(value) if isinstance(value, str) else str(value))[:100]


def _number(text: str, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DeploymentError(f"{text!r} is not a number", field=field)
    return value
