"""The argument parser shared by all commands, with its help and its error messages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tonnage.planner.errors import DeploymentError, TonnageError, did_you_mean, nearest
from tonnage.planner.screen import Screen

BAD_INPUT = 2  # exit code of a command that rejects its input


# Option names of other tools, without leading dashes -> Tonnage's options with the same meaning. The parser of
# a command may lack some of Tonnage's options.
_MEANT = {
    "batch-size": ("--max-num-seqs", "--micro-batch-size"), "bs": ("--max-num-seqs",),
    "concurrency": ("--target-concurrency",), "context": ("--max-model-len", "--sequence-length"),
    "context-length": ("--max-model-len",), "context-size": ("--max-model-len",),
    "ctx": ("--max-model-len",), "ctx-size": ("--max-model-len",), "gpus": ("--tensor-parallel-size",),
    "input": ("--request",), "input-len": ("--request",), "kv-dtype": ("--kv-cache-dtype",),
    "lora": ("--enable-lora", "--method"), "mem-fraction": ("--gpu-memory-utilization",),
    "num-users": ("--target-concurrency",),
    "output-len": ("--request",), "pp": ("--pipeline-parallel-size",), "prompt": ("--request",),
    "quant": ("--quantization",), "requests": ("--request", "--target-concurrency"),
    "seq-len": ("--max-model-len", "--sequence-length"), "tp": ("--tensor-parallel-size",),
    "users": ("--target-concurrency",), "utilization": ("--gpu-memory-utilization",),
    "version": ("--engine-version",), "vram": ("--device-memory",),
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises DeploymentError on bad input and suggests similar option names.

    As in vLLM, `--help=KEYWORD` prints the options whose names contain the keyword, or a whole group. An
    underscore in an option's name is read as a dash.
    """

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog or None,
            # Without an explicit width, argparse imports shutil and compression modules, which takes 5 ms.
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=_width()),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument(
            "-h", "--help", action="help",
            help="show this, or with --help=KEYWORD the options and the group of that name",
        )  # fmt: skip

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the command line.

        Args:
            args: the words after the program's name; None takes them from sys.argv.
            namespace: the object that receives the parsed values; by default, a new one is created.

        Raises:
            DeploymentError: an option or value is invalid; the message names the first invalid word.
            SystemExit: help was printed.
        """
        words = [self._spelled(word) for word in (sys.argv[1:] if args is None else args)]
        for word in words:
            if word in ("-h", "--help") or word.startswith("--help="):
                print(self.help_about(word.partition("=")[2]), end="")
                raise SystemExit(0)
        # Only the intermixed parser of argparse accepts several model names before and after options.
        many = any(action.nargs in ("*", "+") for action in self._get_positional_actions())
        parse = self.parse_known_intermixed_args if many else self.parse_known_args
        found, rest = parse(words, namespace)
        if rest:
            self._refuse(rest)
        # An unset shell variable, as in --html "$FILE", passes an empty value.
        for action in self._actions:
            if action.option_strings and getattr(found, action.dest, None) == "":
                raise DeploymentError("is empty", field=action.option_strings[0], hint="leave it out")
        if "--html" in self._option_string_actions:
            # The page that --html writes quotes the command line.
            found.words = (*self.prog.split(), *_without_token(words))
        return found

    def format_help(self) -> str:
        """Return argparse's help with a one-line usage, because argparse's usage repeats every option."""
        formatter = self._get_formatter()
        named = [formatter._format_args(a, a.metavar or a.dest) for a in self._get_positional_actions()]  # type: ignore[arg-type]
        self.usage = " ".join(["%(prog)s [OPTIONS]", *named])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise a DeploymentError with argparse's message; its `field` is the invalid option's name."""
        about, _, rest = message.partition(": ")
        if about.startswith("argument "):
            field = about.removeprefix("argument ").partition("/")[0]
            raise DeploymentError(rest, field=field, hint=self._listed())
        if rest:  # argparse may name a missing argument twice; keep it once.
            message = f"{about}: {', '.join(dict.fromkeys(rest.split(', ')))}"
        raise DeploymentError(message, hint=self._listed())

    def options(self) -> tuple[str, ...]:
        """Return the long option strings of the parser, such as `--max-model-len`."""
        return tuple(
            option for action in self._actions for option in action.option_strings if option.startswith("--")
        )

    def help_about(self, keyword: str) -> str:
        """Return the help text of an option group, or of the options that match a keyword.

        Args:
            keyword: a group's title, a part of an option's name, or `all` for the whole help.

        Raises:
            DeploymentError: no option or group has the keyword in its name or description.
        """
        wanted = keyword.lower().replace("_", "-").lstrip("-")
        if wanted in ("", "all"):
            return self.format_help()
        groups = {str(g.title).lower(): g._group_actions for g in self._action_groups if g._group_actions}
        named = [a for a in self._actions if any(wanted in option.lower() for option in a.option_strings)]
        told = [a for a in self._actions if wanted in str(a.help).lower().replace("_", "-")]
        found = groups.get(keyword.lower()) or named or told
        if not found:
            raise DeploymentError(
                f"no option of {self.prog} has {keyword[:40]!r} in its name or description", field="--help",
                hint=f"groups: {', '.join(groups)}",
            )  # fmt: skip
        formatter = self._get_formatter()
        formatter.start_section(f"{self.prog}, {keyword}")
        formatter.add_arguments(found)
        formatter.end_section()
        return formatter.format_help()

    def _spelled(self, word: str) -> str:
        """Return `word` with dashes for underscores if that makes it an option, as with --max_model_len."""
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        return (
            dashed + equals + value if name.startswith("--") and dashed in self._option_string_actions else word
        )

    def _refuse(self, rest: Sequence[str]) -> NoReturn:
        word = next((word for word in rest if word.startswith("-") and word != "-"), rest[0])
        name = word.partition("=")[0]
        if not name.startswith("-"):
            raise DeploymentError(f"unexpected argument {word[:80]!r}", hint=self._listed())
        if name in self._option_string_actions:  # A valid option that follows `--` is not parsed.
            raise DeploymentError("must come before the --", field=name)
        close = self._option_for(name)
        guess = f"did you mean {close}? " if close else ""
        raise DeploymentError(f"is no option of {self.prog}", field=name[:80], hint=guess + self._listed())

    def _option_for(self, name: str) -> str | None:
        """Return the valid option that the user probably meant by the unknown option `name`, or None."""
        meant = [
            option for option in _MEANT.get(name.lstrip("-").replace("_", "-"), ()) if option in self.options()
        ]
        return meant[0] if meant else nearest(name, self.options())

    def _listed(self) -> str:
        return f"{self.prog} --help lists the options"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise DeploymentError for a value that is not among the option's `choices`.

        The error names the option and the choice that is most similar to the value.
        """
        if action.choices is None or value in action.choices:
            return
        raise DeploymentError(
            f"{value!r} is not one of {', '.join(map(str, action.choices))}",
            field=action.option_strings[0] if action.option_strings else str(action.metavar),
            hint=did_you_mean(str(value), map(str, action.choices)),
        )

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # Accept a short option only in full, or with an attached value: -qfp8 means -q fp8. argparse would also
        # accept -t as an abbreviation of -tp, even without allow_abbrev.
        return [found for found in super()._get_option_tuples(option_string) if found[1] == option_string[:2]]


def refused(error: TonnageError) -> int:
    """Print `tonnage: ERROR` on stderr and return 2, the exit code for bad input."""
    Screen(sys.stderr).print(f"tonnage: {error}")
    return BAD_INPUT


def _without_token(words: Sequence[str]) -> list[str]:
    """Replace the Hugging Face token in a command line by `...`.

    The command line is shown in HTML pages, which users share.
    """
    shown: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        secret = "..." if before == "--hf-token" else "--hf-token=..." if word.startswith("--hf-token=") else ""
        shown.append(secret or word)
    return shown


def _width() -> int:
    try:
        return max(60, min(110, os.get_terminal_size().columns - 2))
    except OSError:  # A terminal has a width; a pipe or a file has none.
        return 100
