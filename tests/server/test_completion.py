"""``tonnage completion``: its scripts in real shells, and the manual page of the same parsers."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import PATIENCE

from tonnage.server.cli import COMMANDS, main, parser_of

CASES = [  # what is typed, what it becomes or may become
    ("tonnage ver", "verify"),
    ("tonnage plan demo --max-model-l", "--max-model-len"),
    ("tonnage plan demo --engine sgl", "sglang"),
    ("tonnage plan demo -q nvf", "nvfp4"),
    ("tonnage plan demo --gpu b30", "b300-288g"),
    ("tonnage plan demo --emit k8s", "k8s-resources"),
    ("tonnage plan demo --sort price-", "price-per-sequence"),
    ("tonnage dtype 1 --format fp8_e5", "fp8_e5m2"),
    ("tonnage serve demo --admission-mode gua", "guaranteed"),
    ("tonnage train demo --find micro", "micro-batch"),
    ("tonnage replay --policy no_", "no_evict"),
    ("tonnage completion fi", "fish"),
    ("tonnage fit-log star", "startup.log"),  # files
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the completion script of each shell and a file to complete."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with (folder / shell).open("w") as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", file)
            assert main(["completion", shell]) == 0
    (folder / "startup.log").write_text("")
    (folder / "site").mkdir()
    shutil.copyfile(folder / "zsh", folder / "site" / "_tonnage")  # as the help says
    return folder


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine (apt-get install {name})")
    return found


def test_bash_completes_commands_and_options(scripts: Path) -> None:
    lines = ["source ./bash"]
    for typed, _ in CASES:
        words = typed.split()
        lines += [
            f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=()",
            f"_shtab_tonnage tonnage {shlex.quote(words[-1])} {shlex.quote(words[-2])}",
            'echo "${COMPREPLY[*]}"',
        ]
    done = subprocess.run(
        [shell("bash"), "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, cwd=scripts
    )
    assert done.stderr == ""
    for (typed, wanted), said in zip(CASES, done.stdout.splitlines(), strict=True):
        assert wanted in said.split(), typed


def test_fish_completes_commands_and_options(scripts: Path) -> None:
    lines = ["source ./fish"]
    for typed, _ in [*CASES, ("tonnage plan demo -t", "-tp")]:
        lines.append(f"complete -C {shlex.quote(typed)} | string join ' '")
    done = subprocess.run(
        [shell("fish"), "--no-config", "-c", "\n".join(lines)], capture_output=True, text=True, cwd=scripts,
        env=os.environ | {"HOME": str(scripts)},
    )  # fmt: skip
    assert done.stderr == ""
    for (typed, wanted), said in zip([*CASES, ("-t", "-tp")], done.stdout.splitlines(), strict=True):
        assert wanted in said.split(), typed


def test_zsh_completes_commands_and_options(scripts: Path) -> None:
    """Typed into an interactive one, whose line then has the whole word: the script in fpath, then by eval."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [shell("zsh"), "-f", "-i"], stdin=slave, stdout=slave, stderr=slave, cwd=scripts,
        start_new_session=True, env=os.environ | {"HOME": str(scripts), "TERM": "dumb", "PS1": "$ "},
    )  # fmt: skip
    os.close(slave)
    os.set_blocking(master, False)

    def until(word: str) -> str:
        seen, deadline = "", time.monotonic() + PATIENCE
        while word not in seen:
            assert time.monotonic() < deadline, seen
            try:
                seen += os.read(master, 65_536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
        return seen

    def say(text: str) -> None:
        os.write(master, text.encode())

    def begin(text: str) -> None:
        say(f"{text}; echo re''ady\n")
        until("ready")

    try:
        begin("stty cols 200; fpath=($PWD/site $fpath); autoload -U compinit; compinit -u -D")
        for number, (typed, wanted) in enumerate([*CASES, *CASES[:2]]):
            if number == len(CASES):
                begin('compdef -d tonnage; unfunction _tonnage; eval "$(cat zsh)"')
            say(f"{typed}\t")
            until(wanted)
            say("\x15echo ne''xt\n")  # ^U: the line is not run
            until("next")
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_completion_scripts_contain_every_command_and_option(scripts: Path) -> None:
    for name in ("bash", "zsh", "fish"):
        text = (scripts / name).read_text()
        for command in COMMANDS:
            assert command in text
            for option in parser_of(command).options():
                assert option.removeprefix("--") in text, (name, command, option)


def test_completion_for_unknown_shell_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zhs"]) == 2
    assert "did you mean zsh?" in capsys.readouterr().err


def test_manual_page_lists_every_command_and_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command with its options, in their groups; groff reads it without a word."""
    assert main(["completion", "man"]) == 0
    text = capsys.readouterr().out
    page = tmp_path / "tonnage.1"
    page.write_text(text)
    for command in COMMANDS:
        own = text.partition(f'.SH "TONNAGE {command.upper()}"')[2].partition(".SH ")[0]
        for option in parser_of(command).options():
            assert option.replace("-", r"\-") in own
        for group in parser_of(command)._action_groups:
            assert not group._group_actions or f'.SS "{str(group.title).capitalize()}"' in own
    done = subprocess.run(
        [shell("man"), "--warnings", "-l", page], capture_output=True, text=True,
        env=os.environ | {"MANWIDTH": "100", "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    shown = " ".join(re.sub("\b.|\x1b\\[[0-9;]*m", "", done.stdout).replace("\u2010\n", "").split())
    assert "--tensor-parallel-size, -tp N GPUs that each layer is divided over (default: 1)" in shown
    assert "tonnage plan ./Qwen3-32B --gpu h100-80g --trace azure.csv" in shown
