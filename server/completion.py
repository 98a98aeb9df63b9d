"""``tonnage completion SHELL``: prints the completion script for a shell, or the manual page.

shtab generates the scripts from the parsers of all commands, so they always match the commands. The module
imports ``cli``, because it needs the table of all commands.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import shtab

from tonnage.planner.arguments import Parser
from tonnage.planner.devices.catalogue import catalogue
from tonnage.planner.engines.vllm.kv_formats import NAMES as KV_FORMATS
from tonnage.planner.flags import Flag
from tonnage.planner.numbers.command import NAMES as NUMBER_FORMATS
from tonnage.planner.quantization.read import flag_formats
from tonnage.planner.sweep.order import SORTS
from tonnage.server.cli import COMMANDS, OK, parser_of
from tonnage.server.manual import page

SHELLS = ("bash", "zsh", "fish")
MANUAL = "man"
_ABOUT = "Memory of language models: plan it, admit by it, measure it."

# Name of an option -> its valid values, for options whose flag declares no choices.
_NAMES: Mapping[str, Callable[[], Iterable[str]]] = {
    "gpu": lambda: ("auto", "cpu", *(gpu.name for gpu in catalogue())),
    "quantization": flag_formats,
    "kv_cache_dtype": lambda: ("auto", *KV_FORMATS),
    "sort": lambda: SORTS,
    "format": lambda: NUMBER_FORMATS,
}


def parser() -> Parser:
    """Return the parser of ``tonnage completion``."""
    p = Parser(
        "tonnage completion",
        "Print the script that completes commands, options and values in a shell, or the manual page.",
        """
To install it for every shell:
  tonnage completion bash > ~/.local/share/bash-completion/completions/tonnage
  tonnage completion zsh > ~/.zsh/completions/_tonnage     and, in ~/.zshrc before compinit,
                                                           fpath=(~/.zsh/completions $fpath)
  tonnage completion fish > ~/.config/fish/completions/tonnage.fish
For the current shell only:
  eval "$(tonnage completion bash)"     (zsh: the same; fish: tonnage completion fish | source)
The manual page:
  tonnage completion man > ~/.local/share/man/man1/tonnage.1
""",
    )
    targets = (*SHELLS, MANUAL)
    p.add_argument(
        "shell",
        type=str.lower,
        choices=targets,
        metavar="SHELL",
        help=f"{', '.join(SHELLS)}; {MANUAL}: the manual page",
    )
    return p


def run(argv: list[str]) -> int:
    """Print the completion script for a shell, or the manual page, and return 0.

    Raises:
        TonnageError: The shell is unknown.
    """
    arguments = parser().parse_args(argv)
    if arguments.shell == MANUAL:
        print(page(_ABOUT, {name: parser_of(name) for name in COMMANDS}), end="")
        return OK
    script = shtab.complete(offering(tree(), shtab.FILE), arguments.shell)
    if arguments.shell == "fish":
        # shtab 1.13 declares -tp by fish's -s, which takes one letter; -o takes an option of several letters.
        script = re.sub(r" -s (\w\w+)", r" -o \1", script)
    print(script)
    return OK


def tree() -> argparse.ArgumentParser:
    """Return one argument parser whose sub-parsers are the parsers of all ``tonnage`` commands."""
    root = argparse.ArgumentParser(prog="tonnage", description=_ABOUT, allow_abbrev=False)
    root.add_argument("-V", "--version", action="version", version="tonnage", help="print the version")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary)
        commands.choices[name] = parser_of(name)
    return root


def offering(root: argparse.ArgumentParser, file: dict[str, Any]) -> argparse.ArgumentParser:
    """Add to the options of ``root`` the values that shell completion offers, and return ``root``.

    An option with fixed choices offers them, and some options offer names from the catalogues, such as GPUs. An
    option that takes a path gets ``file``, which is shtab's completion of file names. The parser is then for
    completion only, because it would reject valid input that is not among the offered values.
    """
    for action in (*_actions(root), *(a for name in COMMANDS for a in _actions(_commands(root)[name]))):
        values = _values(action)
        if values:
            action.choices = tuple(values)
        elif action.nargs != 0 and _is_file(action):
            action.complete = file  # type: ignore[attr-defined]
    return root


def _commands(root: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(a.choices for a in root._actions if isinstance(a, argparse._SubParsersAction))


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]


def _is_file(action: argparse.Action) -> bool:
    where = action.metavar if isinstance(action.metavar, str) else ""
    return where.startswith(("FILE", "MODEL", "TRACE")) or where == "M"


def _values(action: argparse.Action) -> Iterable[str]:
    if action.choices is not None:
        return tuple(action.choices)
    flag = getattr(action.type, "__self__", None)
    if isinstance(flag, Flag) and (found := flag.choices or tuple(_named(flag.name))):
        return found
    # For the options --engine, --emit and --find, only the metavar lists the valid values.
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return metavar.split("|") if "|" in metavar else _named(action.dest)


def _named(name: str) -> Iterable[str]:
    """Return the values that completion offers for the option ``name``, such as GPU names; may be empty."""
    names = _NAMES.get(name)
    return names() if names else ()
