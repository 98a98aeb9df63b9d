"""``tonnage completion SHELL``: the script that completes commands, options and their values; the manual page.

Made by shtab from the parsers of all commands, so it is never older than they are. Above the table of commands,
because it is about all of them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any

from tonnage.planner.arguments import Parser
from tonnage.planner.flags import Flag
from tonnage.server.cli import COMMANDS, OK, parser_of

SHELLS = ("bash", "zsh", "fish")
MANUAL = "man"
_ABOUT = "Memory of language models: plan it, admit by it, measure it."


def parser() -> Parser:
    p = Parser(
        "tonnage completion",
        "Print the script that completes commands, options and values in a shell, or the manual page.",
        """
To have it in every shell:
  tonnage completion bash > ~/.local/share/bash-completion/completions/tonnage
  tonnage completion zsh > ~/.zsh/completions/_tonnage     and, in ~/.zshrc before compinit,
                                                           fpath=(~/.zsh/completions $fpath)
  tonnage completion fish > ~/.config/fish/completions/tonnage.fish
In this one alone:
  eval "$(tonnage completion bash)"     (zsh: the same; fish: tonnage completion fish | source)
The manual page:
  tonnage completion man > ~/.local/share/man/man1/tonnage.1
""",
    )
    asked = (*SHELLS, MANUAL)
    p.add_argument(
        "shell",
        type=str.lower,
        choices=asked,
        metavar="SHELL",
        help=f"{', '.join(SHELLS)}; {MANUAL}: the manual page",
    )
    return p


def run(argv: list[str]) -> int:
    """Returns 0; raises TonnageError for another shell."""
    arguments = parser().parse_args(argv)
    if arguments.shell == MANUAL:
        from tonnage.server.manual import page  # nor of this

        print(page(_ABOUT, {name: parser_of(name) for name in COMMANDS}), end="")
        return OK
    import shtab  # --help needs none of it

    script = shtab.complete(offering(tree(), shtab.FILE), arguments.shell)
    if arguments.shell == "fish":
        # shtab 1.13 takes -tp for the letters t and p; -o is an old-style long option
        script = re.sub(r" -s (\w\w+)", r" -o \1", script)
    print(script)
    return OK


def tree() -> argparse.ArgumentParser:
    """All commands as one parser; the parsers of the commands themselves."""
    root = argparse.ArgumentParser(prog="tonnage", description=_ABOUT, allow_abbrev=False)
    root.add_argument("-V", "--version", action="version", version="tonnage", help="print the version")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary)
        commands.choices[name] = parser_of(name)
    return root


def offering(root: argparse.ArgumentParser, file: dict[str, Any]) -> argparse.ArgumentParser:
    """``root`` with values for its options: choices of the flags, names of the catalogue, ``file`` where a file
    or a folder is meant. Only to be completed from: it parses no more."""
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
    # said by the metavar where nothing else says it: --engine, --emit, --find
    told = action.metavar if isinstance(action.metavar, str) else ""
    return told.split("|") if "|" in told else _named(action.dest)


def _named(name: str) -> Iterable[str]:
    """Names that a flag without choices is checked against where the engine is known."""
    if name == "gpu":
        from tonnage.planner.devices.catalogue import catalogue  # reads a file

        return ("auto", "cpu", *(gpu.name for gpu in catalogue()))
    if name == "quantization":
        from tonnage.planner.quantization.read import flag_formats  # imports every format

        return flag_formats()
    if name == "kv_cache_dtype":
        from tonnage.planner.engines.vllm.kv_formats import NAMES  # imports an engine

        return ("auto", *NAMES)
    if name == "sort":
        from tonnage.planner.sweep.order import SORTS  # imports the planner

        return SORTS
    if name == "format":
        from tonnage.planner.numbers.command import NAMES as FORMATS  # of `tonnage dtype`

        return FORMATS
    return ()
