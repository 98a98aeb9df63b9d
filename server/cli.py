"""``tonnage``: a table of sub-commands, each imported only when it is called.

``tonnage plan`` answers in under 200 ms, so nothing is imported here that it does not need.
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
from tonnage.server.extras import AN_ENGINE, extra_with, require

if TYPE_CHECKING:
    from tonnage.planner.arguments import Parser

if "--multiprocessing-fork" in sys.orig_argv:
    # An engine core or a worker of vLLM's, which reads this module before all else (multiprocessing/spawn.py).
    # What it imports stays, and at the default of 700 the collector goes through it again and again: for 2.9 of
    # 11 s of processor time until it is ready (vLLM 0.32), so for 1.7.
    gc.set_threshold(50_000)

# name -> (module with run(argv) -> exit code, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("tonnage.planner.command", "say what a model needs and what a device carries, before a load"),
    "train": ("tonnage.planner.training.command", "say what training a model needs and what makes it fit"),
    "dtype": ("tonnage.planner.numbers.command", "show a value's bits and rounding in every number format"),
    "page": ("tonnage.planner.page.command", "a page that plans, in the browser; or its files for a web host"),
    "fit-log": ("tonnage.planner.fitlog.command", "hold an engine's start-up log against the plan"),
    "replay": ("tonnage.server.commands.replay", "replay a request trace through admission and block manager"),
    "serve": ("tonnage.server.commands.serve", "plan, then serve the OpenAI API and /metrics from that plan"),
    "verify": ("tonnage.server.commands.verify", "load a model and compare the plan with what is really held"),
    "watch": (
        "tonnage.server.commands.watch",
        "show a running server beside its plan: vLLM, SGLang, llama.cpp",
    ),
    "status": (
        "tonnage.server.commands.status",
        "show a Tonnage server at a glance",
    ),
    "doctor": ("tonnage.server.commands.doctor", "say what is installed and which backend would be chosen"),
    "completion": (
        "tonnage.server.completion",
        "print the script that completes this in bash, zsh or fish; man: the manual",
    ),
    "demo": ("tonnage.server.commands.demo", "plan, serve, ask and measure the demo model, then stop"),
}

# command -> the extra that it needs; the planner's commands and status need none
EXTRAS = {
    "replay": "replay", "serve": "server", "verify": "server", "watch": "server", "doctor": "server",
    "demo": "demo",
}  # fmt: skip

OK, FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a file that the output goes to


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    return f"""usage: tonnage COMMAND [OPTIONS]

Memory of language models: plan it, admit by it, measure it.

{lines}

MODEL is a local folder with config.json, a .gguf file, a hub id, or demo (SmolLM2-135M-Instruct).
tonnage COMMAND --help shows the options of a command, --help=WORD those with that word; --version the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command. Returns its exit code: 0 done, 1 the answer is no, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open()
    _encodable()
    try:
        code = _dispatch(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # a broken pipe or a full disk shows here, not at interpreter exit
        return code
    except TonnageError as error:
        print(f"tonnage: {error}", file=sys.stderr)
        return USAGE
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "tonnage"):  # ours to fix, not the user's
            raise
        extra = extra_with(missing)
        bring = f" (pip install 'tonnage[{extra}]' installs it)" if extra else ""
        print(f"tonnage: {missing} is not installed{bring}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("tonnage: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stdout = None  # or the interpreter flushes it again and complains
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        print(f"tonnage: what it prints cannot be written: {error.strerror}", file=sys.stderr)
        sys.stdout = None
        return FAILED


def _open() -> None:
    """What was closed before the start (``>&-``, some cron) goes nowhere; print sends errors to stdout then."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _encodable() -> None:
    """What a terminal that is not UTF-8 cannot show is a question mark there, and no traceback."""
    out, refusing = sys.stdout, ("strict", "surrogateescape")  # the latter in the C locale
    if isinstance(out, TextIOWrapper) and not out.encoding.lower().startswith("utf") and out.errors in refusing:
        out.reconfigure(errors="replace")


def parser_of(name: str) -> Parser:
    """The options of a command, without what the command needs to run."""
    if not COMMANDS[name][0].startswith("tonnage.planner."):
        from tonnage.server.parsers import PARSERS  # no other command needs it

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
        from importlib.metadata import version  # 20 ms that no other command needs

        print(f"tonnage {version('tonnage')}")
        return OK
    if name not in COMMANDS:
        return _unknown(name)
    if any(word in ("-h", "--help") or word.startswith("--help=") for word in rest):
        with contextlib.suppress(SystemExit):  # argparse's, once it has printed the help
            parser_of(name).parse_args(rest)
        return OK
    module = COMMANDS[name][0]
    if name == "plan" and any(word.split("=")[0] == "--replicas" for word in rest):
        module = "tonnage.server.commands.replicas"  # it replays; the planner alone knows no cache
        require("replay", "--replicas")
    elif name == "plan" and any(word.split("=")[0] == "--trace" for word in rest):
        module = "tonnage.server.commands.lengths"  # traces are the cache's
    if name in EXTRAS:
        require(EXTRAS[name], name, AN_ENGINE if name in ("serve", "verify") else None)
    run: Callable[[list[str]], int] = import_module(module).run
    return run(rest)


def _unknown(name: str) -> int:
    close = nearest(name, COMMANDS)
    guess = f"did you mean {close}? " if close else ""
    print(f"tonnage: unknown command {name[:80]!r} ({guess}one of: {', '.join(COMMANDS)})", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
