"""The trial process: it compiles each grammar in a fork, which the kernel kills if the fork exceeds its limits.

It is started as ``python -m tonnage.server.engines.grammars.trial_process FD FOLDER`` and ends when its parent
ends. It holds llguidance and a tokenizer of bytes (11 MiB), and has no threads, so a fork takes some
milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import sys
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.planner.engines.runtime.grammars import GRAMMAR_TRIAL_BYTES
from tonnage.server.engines.grammars.library import (
    GrammarError,
    byte_tokenizer,
    check,
    first_line,
    matcher_of,
    parts_of,
    source_of,
)
from tonnage.server.engines.grammars.messages import Tried, Try
from tonnage.server.engines.process_memory import anonymous_bytes

if TYPE_CHECKING:
    import llguidance

# Upper bound in seconds of the processor time of a forked process that compiles one grammar. A schema of 1,000
# optional properties takes 0.1 s, a choice among 5,000 words 0.04 s, and 1,800 rules of EBNF 0.4 s.
SECONDS = 1.0
# Upper bound in bytes of the memory that a forked process may take to compile one grammar, in addition to the
# memory of the process that it is forked from. Among schemas of 120,000 bytes that compile within a second, the
# largest took 21 MiB.
MEMORY_BYTES = GRAMMAR_TRIAL_BYTES
# Upper bound in bytes of the stack of a forked process that compiles one grammar. llguidance follows a schema's
# references by recursion. The engine's stack has 8 MiB, and some thousand levels of recursion would crash the
# engine. The forked process has an eighth of that stack. So a grammar that it can compile is not too deep for
# the engine.
STACK_BYTES = 1 << 20
# Niceness of a process that compiles a grammar to check its limits. Threads that compute or draw tokens thereby
# have priority.
BEHIND_THE_ENGINE = 5

TOO_MUCH = (
    f"the grammar needs more than {SECONDS:g} s of processor time or {MEMORY_BYTES >> 20} MiB, or is nested "
    "too deeply; simplify it"
)


@dataclass(frozen=True, slots=True)
class _Fork:
    """A forked process that compiles one grammar: its process id, and the ``number`` of the `Try` message."""

    number: int
    pid: int


def main(descriptor: int, folder: str) -> None:
    """Compile each received grammar in a forked process; answer each Try message with a Tried message.

    Args:
        descriptor: file descriptor of the socket to the parent process.
        folder: folder with the model's tokenizer.json.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    forks: dict[Connection, _Fork] = {}
    tokenizer = byte_tokenizer(_special_tokens(folder))
    with contextlib.suppress(EOFError, OSError):
        gc.freeze()  # garbage collection in a fork would write to shared pages, which copies them
        while True:
            for ready in wait([connection, *forks]):
                assert isinstance(ready, Connection)
                if ready is not connection:
                    if ready in forks:  # a Forget message in this iteration may have ended the fork
                        connection.send(_result(ready, forks.pop(ready)))
                    continue
                message = connection.recv()
                if isinstance(message, Try):
                    _begin(tokenizer, message, connection, forks)
                    continue
                for reader in [reader for reader, fork in forks.items() if fork.number == message.number]:
                    _end(reader, forks.pop(reader))
    for reader, fork in forks.items():
        _end(reader, fork)


def _special_tokens(folder: str) -> list[str]:
    """Return the texts of the model's special tokens.

    A forked process parses tokenizer.json and then ends, because the parsed content takes ten times as much
    memory as the file has bytes.
    """
    reader, writer = Pipe(duplex=False)
    if not (pid := os.fork()):
        try:
            text = Path(folder, "tokenizer.json").read_text(encoding="utf-8")
            writer.send([token["content"] for token in json.loads(text)["added_tokens"] if token["special"]])
        finally:
            os._exit(0)
    writer.close()
    try:
        special: list[str] = reader.recv()
    except EOFError:  # the file is missing or invalid, which the engine reports
        special = []
    os.waitpid(pid, 0)
    return special


def _begin(
    tokenizer: llguidance.LLTokenizer, trial: Try, connection: Connection, forks: dict[Connection, _Fork]
) -> None:
    """Fork a process that compiles a grammar, and add the reading end of the process's pipe to ``forks``."""
    reader, writer = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        writer.close()
        forks[reader] = _Fork(trial.number, pid)
        return
    try:
        connection.close()
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # discards the message that Rust prints on a crash
        _limit()
        writer.send(_try(tokenizer, trial))
    finally:
        os._exit(0)


def _limit() -> None:
    """Let the kernel limit the processor time, memory and stack of this process, which compiles one grammar."""
    os.nice(BEHIND_THE_ENGINE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    # The first number in statm is the size of the address space in pages.
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        most = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process


def _try(tokenizer: llguidance.LLTokenizer, trial: Try) -> Tried:
    """Compile a grammar and compute its first token mask, as the engine will do; return the result message."""
    before = anonymous_bytes()
    try:
        source = trial.grammar.text
        for part in parts_of(trial.grammar):
            made = source_of(part)
            matcher = matcher_of(tokenizer, made)
            matcher.compute_bitmask()
            check(matcher)
            if part is trial.grammar:
                source = made
    except GrammarError as error:
        return Tried(trial.number, error=error.message)
    except (MemoryError, RecursionError):
        return Tried(trial.number, error=TOO_MUCH)
    except Exception as error:  # the text is not a grammar, so a converter may raise any error
        return Tried(trial.number, error=first_line(str(error)))
    return Tried(trial.number, source, bytes=anonymous_bytes() - before)


def _result(reader: Connection, fork: _Fork) -> Tried:
    """Return the result that a forked process has sent, or an error if the process ended without a result."""
    try:
        tried: Tried = reader.recv()
    except (EOFError, OSError):  # the fork ended without a result, because the kernel has killed it
        tried = Tried(fork.number, error=TOO_MUCH)
    _end(reader, fork)
    return tried


def _end(reader: Connection, fork: _Fork) -> None:
    reader.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(fork.pid, signal.SIGKILL)  # the pid is valid until waitpid below
    os.waitpid(fork.pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
