"""The command ``tonnage``: a table of its sub-commands, each of which is imported only when it is called.

``tonnage plan`` has to answer in under 200 ms, so this module imports only what every command needs.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING

from tonnage.planner.errors import TonnageError, nearest
from tonnage.planner.screen import Screen
from tonnage.server.extras import AN_ENGINE, extra_with, require

if TYPE_CHECKING:
    from tonnage.planner.arguments import Parser

if "--multiprocessing-fork" in sys.orig_argv:
    # This process is an engine core or a worker of vLLM, which imports this module first
    # (multiprocessing/spawn.py). The modules that it imports are never freed, yet the garbage collector scans
    # them again and again. Until the process is ready, which takes 11 s of processor time, these scans take
    # 2.9 s with the default threshold of 700, and 1.7 s with this threshold (vLLM 0.32).
    gc.set_threshold(50_000)

# name of a command -> (module with a function run(argv) -> exit code, summary for the usage text)
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("tonnage.planner.command", "show what a model needs and what a device can hold"),
    "train": ("tonnage.planner.training.command", "show what training a model needs and what makes it fit"),
    "dtype": ("tonnage.planner.numbers.command", "show a value's bits and rounding in every number format"),
    "page": ("tonnage.planner.page.command", "open the planner in the browser, or write its files for a host"),
    "fit-log": ("tonnage.planner.fitlog.command", "compare an engine's start-up log with the plan"),
    "replay": ("tonnage.server.commands.replay", "replay a request trace through admission and block manager"),
    "serve": ("tonnage.server.commands.serve", "plan, then serve the OpenAI API and /metrics from that plan"),
    "verify": ("tonnage.server.commands.verify", "load a model and compare its measured memory with the plan"),
    "watch": ("tonnage.server.commands.watch", "show a vLLM, SGLang or llama.cpp server beside its plan"),
    "status": ("tonnage.server.commands.status", "show a Tonnage server at a glance"),
    "doctor": ("tonnage.server.commands.doctor", "show what is installed and which backend would be chosen"),
    "completion": ("tonnage.server.completion", "print a shell's completion script, or the manual page (man)"),
    "demo": ("tonnage.server.commands.demo", "plan, serve, query and measure the demo model, then stop"),
}

# name of a command -> the extra that it needs; `status` and the planner's commands need none
EXTRAS = {
    "replay": "replay", "serve": "server", "verify": "server", "watch": "server", "doctor": "server",
    "demo": "demo",
}  # fmt: skip

_GPUS = "tonnage plan demo --gpu list names the GPUs"
_MODELS = "tonnage plan takes a folder or a hub id; tonnage page has a list of models"
# word that users may type but that is no command -> the command to use instead
_INSTEAD = {
    "devices": _GPUS, "gpus": _GPUS, "gpu": _GPUS, "list": _GPUS, "models": _MODELS, "model": _MODELS,
    "estimate": "tonnage plan MODEL --gpu NAME", "size": "tonnage plan MODEL --gpu NAME",
    "start": "tonnage serve MODEL", "run": "tonnage serve MODEL", "finetune": "tonnage train MODEL",
    "health": "tonnage status", "version": "tonnage --version", "log": "tonnage fit-log FILE",
    "bench": "tonnage replay TRACE --model MODEL", "simulate": "tonnage replay TRACE --model MODEL",
}  # fmt: skip

OK, FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

# errors that mean that no space is left for the output (disk, quota or file size)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def usage() -> str:
    """Return the text of ``tonnage --help``: the commands with their summaries."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    return f"""usage: tonnage COMMAND [OPTIONS]

Memory of language models: plan it, admit by it, measure it.

{lines}

MODEL is a folder with config.json, a .gguf file, a hub id, or demo.
tonnage COMMAND --help lists a command's options, --help=WORD the matching ones.
tonnage --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code.

    Returns:
        0 for success, 1 for a negative result such as a plan that does not fit, 2 for bad input, 130 when
        interrupted by Ctrl-C, and 141 for a closed output pipe.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open()
    _encodable()
    try:
        code = _dispatch(arguments)
        if sys.stdout is not None:
            # Flush here, so that a broken pipe or a full disk is reported as an error of the command, not at
            # interpreter exit.
            sys.stdout.flush()
        return code
    except TonnageError as error:
        Screen(sys.stderr).print(f"tonnage: {error}")
        return USAGE
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "tonnage"):  # A missing module of Tonnage itself is a defect, not a missing extra.
            raise
        extra = extra_with(missing)
        bring = f" (pip install 'tonnage[{extra}]' installs it)" if extra else ""
        print(f"tonnage: {missing} is not installed{bring}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("tonnage: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The program that reads this command's output, such as head or less, has ended. With stdout still set,
        # the interpreter would flush it again at exit and report the error twice.
        sys.stdout = None
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        print(f"tonnage: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.stdout = None
        return FAILED


def _open() -> None:
    """Open /dev/null in place of stdout or stderr if the caller closed it (``>&-``, some cron jobs)."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _encodable() -> None:
    """Make stdout print ``?`` for characters that its encoding lacks, instead of raising an error."""
    # surrogateescape is Python's error handler of stdout in the C locale.
    out, refusing = sys.stdout, ("strict", "surrogateescape")
    if isinstance(out, TextIOWrapper) and not out.encoding.lower().startswith("utf") and out.errors in refusing:
        out.reconfigure(errors="replace")


def parser_of(name: str) -> Parser:
    """Return the argument parser of a command, without importing the libraries that running it needs."""
    if not COMMANDS[name][0].startswith("tonnage.planner."):
        # imported here, because the planner's commands do not need the server's parsers
        from tonnage.server.parsers import PARSERS

        if name in PARSERS:
            return PARSERS[name]()
    made: Parser = import_module(COMMANDS[name][0]).parser()
    return made


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(usage(), end="", file=sys.stderr)
        return USAGE
    name, rest = arguments[0], arguments[1:]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage(), end="")
        return OK
    if name in ("-V", "--version"):
        # imported here, because it takes 20 ms and only --version needs it
        from importlib.metadata import version

        print(f"tonnage {version('tonnage')}")
        return OK
    if name not in COMMANDS:
        return _unknown(name)
    if any(word in ("-h", "--help") or word.startswith("--help=") for word in rest):
        with contextlib.suppress(SystemExit):  # argparse raises SystemExit after it has printed the help
            parser_of(name).parse_args(rest)
        return OK
    module = COMMANDS[name][0]
    if name == "plan" and any(word.split("=")[0] == "--replicas" for word in rest):
        # `tonnage plan --replicas` is implemented in the server package, because it replays traces with the
        # cache package, which the planner may not import.
        module = "tonnage.server.commands.replicas"
        require("replay", "--replicas")
    elif name == "plan" and any(word.split("=")[0] == "--trace" for word in rest):
        # `tonnage plan --trace` is implemented in the server package, because it reads the trace with the cache
        # package, which the planner may not import.
        module = "tonnage.server.commands.trace_concurrency"
    if name in EXTRAS:
        require(EXTRAS[name], name, AN_ENGINE if name in ("serve", "verify") else None)
    run: Callable[[list[str]], int] = import_module(module).run
    return run(rest)


def _unknown(name: str) -> int:
    if (instead := _INSTEAD.get(name.lower())) is None:
        close = nearest(name, COMMANDS)
        instead = f"{f'did you mean {close}? ' if close else ''}one of: {', '.join(COMMANDS)}"
    Screen(sys.stderr).print(f"tonnage: unknown command {name[:80]!r} ({instead})")
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
