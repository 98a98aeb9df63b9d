"""Run a process that is no service under the system call filter of a systemd unit, built as systemd does.

    python unit_filter.py UNIT COMMAND ...      runs COMMAND under the filter of UNIT; needs no root

Source: systemd.exec(5), SystemCallFilter= and SystemCallErrorNumber=. The groups come from the installed
systemd (``systemd-analyze syscall-filter``), the filter from libseccomp.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

# linux/seccomp.h and linux/prctl.h
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_NO_NEW_PRIVS = 38


def settings(unit: Path, name: str) -> list[str]:
    """Return the values of each line ``name=`` of a unit file, in order."""
    lines = unit.read_text().splitlines()
    return [line.partition("=")[2].strip() for line in lines if line.startswith(f"{name}=")]


def groups() -> dict[str, set[str]]:
    """@name -> its system calls and groups, by the systemd that is installed."""
    said = subprocess.run(
        ["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, set[str]] = {}
    for line in said.splitlines():
        word = line.strip()
        if line.startswith("@"):
            members = found.setdefault(word, set())
        elif line.startswith(" ") and not word.startswith("#"):
            members.add(word)
    return found


def expanded(words: list[str], known: dict[str, set[str]]) -> set[str]:
    """System calls of calls and @groups, which may hold groups."""
    calls: set[str] = set()
    for word in words:
        calls |= expanded(sorted(known[word]), known) if word.startswith("@") else {word}
    return calls


def allowed(unit: Path, known: dict[str, set[str]]) -> set[str]:
    """Return the system calls that the unit's lines allow; a later line adds calls, or removes them with ~."""
    first, *others = settings(unit, "SystemCallFilter")
    assert not first.startswith("~")
    calls = expanded(first.split(), known) | expanded(["@default"], known)
    for line in others:
        named = expanded(line.removeprefix("~").split(), known)
        calls = calls - named if line.startswith("~") else calls | named
    return calls


def install(unit: Path) -> None:
    """Put this process, and all that it starts, under the filter of ``unit``."""
    known = groups()
    calls = allowed(unit, known)
    number = settings(unit, "SystemCallErrorNumber")
    refused = _ERRNO | getattr(errno, number[-1]) if number else _KILL_PROCESS
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    # What systemd itself does not know is answered with ENOSYS, as by a kernel that does not have it.
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.ENOSYS)))
    for name in sorted(expanded(["@known"], known) | calls):
        call = library.seccomp_syscall_resolve_name(name.encode())
        action = _ALLOW if name in calls else refused
        if call >= 0:  # this machine has it
            assert library.seccomp_rule_add(context, ctypes.c_uint32(action), ctypes.c_int(call), 0) == 0, name
    assert ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert library.seccomp_load(context) == 0


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
