"""The manual page tonnage(1), generated from the same parsers as ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version


def page(about: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the manual page in man(7) markup, with the options and examples of each command."""
    source = f"Tonnage {version('tonnage')}"
    listed = [(".TP", _bold(name), _text(parser.description or "")) for name, parser in parsers.items()]
    lines = [
        f'.TH TONNAGE 1 "" "{source}" "User Commands"',
        ".SH NAME", _text(f"tonnage - {about[0].lower()}{about[1:].rstrip('.')}"),
        ".SH SYNOPSIS", r".B tonnage", r"\fICOMMAND\fR [\fIOPTIONS\fR]",
        ".SH DESCRIPTION", _text(about), ".SH COMMANDS",
        *(line for entry in listed for line in entry),
    ]  # fmt: skip
    for name, parser in parsers.items():
        lines += [f'.SH "TONNAGE {name.upper()}"', *_command(parser)]
    return "\n".join([*lines, ""])


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    named = [a.metavar or a.dest for a in parser._get_positional_actions()]
    yield _bold(parser.prog)
    yield " ".join([*(f"\\fI{_escaped(str(name))}\\fR" for name in dict.fromkeys(named)), r"[\fIOPTIONS\fR]"])
    yield ".PP"
    yield _text(parser.description or "")
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        if actions:
            yield f'.SS "{_escaped((group.title or "").capitalize())}"'
            yield from (line for action in actions for line in _option(parser, action))
    if parser.epilog:
        yield ".SS Notes"
        yield ".nf"
        yield from map(_text, parser.epilog.strip("\n").splitlines())
        yield ".fi"


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    formatter = parser._get_formatter()
    value = "" if action.nargs == 0 else formatter._format_args(action, action.dest.upper())
    names: Iterable[str] = action.option_strings or (value,)
    names_text = ", ".join(f"\\fB{_escaped(name)}\\fR" for name in names)
    yield ".TP"
    yield names_text + (f" \\fI{_escaped(value)}\\fR" if action.option_strings and value else "")
    yield _text(formatter._expand_help(action) if action.help else "")


def _bold(text: str) -> str:
    return f".B {_escaped(text)}"


def _text(text: str) -> str:
    r"""Return ``text`` as one line of text; ``\&`` keeps a leading dot or quote from starting a macro."""
    escaped = _escaped(text)
    return r"\&" + escaped if escaped[:1] in (".", "'") else escaped


def _escaped(text: str) -> str:
    return text.replace("\\", r"\e").replace("-", r"\-")
