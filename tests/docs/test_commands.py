"""Every command in the documentation runs, or its parts are looked up, or it is listed with a reason.

``console`` blocks run with their output in test_documentation.py, and in test_served.py where they need a
server. This file covers ``sh`` blocks and code spans. Planner commands run, and ``tonnage serve`` runs up to
its plan. For make, pip, Helm, Compose and similar tools, the names that they use must exist. ``vllm serve``
runs in tests/server/vllm/served/test_shown.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import documented
import jsonschema
import pytest
import yaml
from shown import PROGRAMS, ROOT, Shown, pages, shown, stray

from tonnage.planner.errors import TonnageError
from tonnage.server.cli import COMMANDS, main, parser_of
from tonnage.server.commands.launch import plan_for_loading, select_backend, settings_from

NOT_RUN = {
    "git log --oneline": "the history of a checkout; an archive of the sources has none",
    "hf auth login": "asks for the token of a user's account",
    "hf download": "fetches a model of the user's choice",
    "pip install": "a name, no command line",
    "vllm bench serve": "make load runs it against a server (benchmarks/load_tools.py)",
}
# Commands of ours that ask a server, or are one: their console blocks run in test_served.py.
ASKS = {"status", "watch", "verify", "demo", "page"}
SMALL = "Qwen/Qwen3-0.6B"  # fits into the CPU memory of any machine
# What stands for something of the reader's.
FILLED = {
    "MODEL": SMALL, "FOLDER": SMALL, "TRACE": "requests.csv", "VALUE": "0.1", "SHELL": "bash",
    "URL": "http://localhost:8000", "azure_llm_2023_conv.csv": "requests.csv", "Qwen2.5-7B": "Qwen/Qwen2.5-7B",
    "FILE": "log", "S": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the commands run: models by their names, traces, logs, and what a deployment's lines write into."""
    with documented.models():
        place = Path.cwd()
        trace = place / "traces/azure_conversation_300.csv"
        shutil.copy(trace, "requests.csv")
        shutil.copy(min(Path("logs").glob("*dtbf16-kvfp8.log")), "log")
        _runs(["fit-log", "log", "--calibrate", "kept"])
        columns = {"TIMESTAMP": "t", "ContextTokens": "in", "GeneratedTokens": "out"}
        text = trace.read_text()
        for name, own in columns.items():
            text = text.replace(name, own)
        Path("own.csv").write_text(text)
        (place / "deploy/vllm").mkdir(parents=True)
        for home in (".local/share/bash-completion/completions", ".local/share/man/man1", ".zsh/completions"):
            (place / home).mkdir(parents=True)
        (place / ".config/fish/completions").mkdir(parents=True)
        yield place


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_documented_command_is_valid(page: Path, folder: Path) -> None:
    for command in shown(page):
        if command.fence == "console" or command.command in NOT_RUN:
            continue
        try:
            _check(command)
        except (AssertionError, OSError, SystemExit, TonnageError) as error:
            pytest.fail(f"{command}\n{error}")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_occur_only_in_checked_code_fences(page: Path) -> None:
    assert stray(page) == [], "commands stand in fences of console or sh"


def test_every_command_excluded_from_checks_occurs_in_the_documentation() -> None:
    everything = {command.command for page in pages() for command in shown(page)}
    assert set(NOT_RUN) <= everything


@pytest.mark.parametrize(
    "wrong",
    [
        "tonnage plan MODEL --max-model-length 4096", "tonnage plam MODEL", "tonnage serve MODEL --backend vlm",
        "make tset", "pip install 'tonnage[hff]'", "uvx tonnage plam", "python benchmarks/no_such.py",
        "python benchmarks/abuse.py --lists", "python -m tonnage.serve", "bash .ci/walk", "frobnicate now",
        "docker compose -f deploy/compose.yml up", "GPU=2 docker compose -f deploy/compose.yaml up",
        "docker build -f deploy/Dockerfile --target vllm .",
        "helm install NAME deploy/helm/tonnage --set serviceMonitors.enabled=true",
        'eval "$(tonnage completion sh)"', "systemctl enable --now tonnages",
        "printf '%s' TONNAGE_MODEL=demo TONNAGE_MAX_MODEL_LENGTH=2048 > /etc/tonnage/tonnage.env",
    ],
)  # fmt: skip
def test_invalid_command_in_the_documentation_is_detected(wrong: str, folder: Path) -> None:
    with pytest.raises((AssertionError, OSError, SystemExit, TonnageError)):
        _check(Shown("here", 1, wrong, "sh"))


# -- by program


def _check(command: Shown) -> None:
    """Raise AssertionError with the fault of a documented command."""
    words = shlex.split(command.command)
    if "&&" in words:
        for part in command.command.split(" && "):
            _check(Shown(command.page, command.line, part, command.fence))
        return None
    variables = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program = words[0].removeprefix(".venv/bin/").removeprefix("/opt/tonnage/bin/")
    if program.endswith(".py"):
        return _script(words)
    check = CHECKS.get(program)
    assert check, f"no place for {program}: a check here, or NOT_RUN with the reason"
    if program == "tonnage":
        return _tonnage(words[1:], whole=command.fence == "sh")
    return check(words[1:], variables)


def _tonnage(words: list[str], whole: bool) -> None:
    """Run; of a code span, which may leave things out, without a model: its options are known."""
    if ">" in words:
        words, target = words[: words.index(">")], words[-1]
    else:
        target = ""
    words = [word.strip("[]") for word in words if word != "..."]
    words = [FILLED.get(word, word) for word in words]
    name = words[0]
    if name.startswith("--"):
        return _runs(words, target)
    assert name in COMMANDS, f"no command {name}"
    options = {option for action in parser_of(name)._actions for option in action.option_strings}
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert given <= options, given - options
    if name == "serve" and len(words) > 1 and not words[1].startswith("--help"):
        arguments = parser_of("serve").parse_args(
            ["demo", *(word for word in words[1:] if word not in (SMALL, "demo"))]
        )
        with contextlib.redirect_stderr(io.StringIO()) as said:
            plan = plan_for_loading(*select_backend(settings_from(arguments), io.StringIO()), io.StringIO())
        assert plan.fits, said.getvalue()
    elif name not in ASKS and (whole or target or set(words) & {*FILLED.values()}):
        _runs([{"log": "kept"}.get(word, word) if "--calibration" in words else word for word in words], target)


def _runs(words: list[str], target: str = "") -> None:
    out, err = io.StringIO(), io.StringIO()
    if words[0] == "fit-log" and "--model" not in words:
        words = [*words, "--model", "meta-llama/Meta-Llama-3.1-8B"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    assert status in (0, 1), err.getvalue()  # 1: it does not fit, which is an answer
    assert out.getvalue()
    if target:
        Path(target.replace("~", str(Path.cwd()))).write_text(out.getvalue())


def _make(words: list[str], variables: dict[str, str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        assert re.search(rf"^{re.escape(word)}:", text, re.M), f"the Makefile has no {word}"
    for name in variables:
        assert re.search(rf"^{name} \?=", text, re.M), f"the Makefile reads no {name}"


def _pip(words: list[str], variables: dict[str, str]) -> None:
    assert words[0] in ("install", "uninstall")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        named = re.fullmatch(r"(\.|[\w-]+)(?:\[([\w,]+)\])?", word)
        assert named, word
        assert named[1] in (".", project["name"]), f"{named[1]} is not ours"
        extras = set((named[2] or "").split(",")) - {""}
        assert extras <= set(project["optional-dependencies"]), extras


def _uvx(words: list[str], variables: dict[str, str]) -> None:
    if words[:2] in (["--from", "."], ["run", "tonnage"]):
        words = words[2:] if words[0] == "--from" else words[1:]
    assert words[0] == "tonnage", words
    _tonnage(words[1:], whole=False)


def _python(words: list[str], variables: dict[str, str]) -> None:
    if words[0] != "-m":
        return _script(words)
    assert importlib.util.find_spec(words[1]) is not None, f"no module {words[1]}"
    for word in words[2:] if words[1] == "pytest" else []:
        assert word.startswith("-") or (ROOT / word).exists(), f"no {word}"


def _script(words: list[str]) -> None:
    """Check that a documented script exists and its source defines the given options."""
    file = next((place for place in (ROOT / words[0], ROOT / "benchmarks" / words[0]) if place.exists()), None)
    assert file, f"no script {words[0]}"
    sources = [file, *file.with_suffix("").glob("*.py")]
    text = "".join(source.read_text() for source in sources)
    options = [word for word in words[1:] if word.startswith("--")]
    if any(f'"{option}"' not in text for option in options):  # made, not written down
        text = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True).stdout
        assert all(re.search(rf"{option}\b", text) for option in options), (
            f"{file.name} has not all of {options}"
        )
    for word in words[1:]:
        assert "{" in word or not word.startswith(("tests/", "cache/", "planner/")) or (ROOT / word).exists(), (
            word
        )


def _bash(words: list[str], variables: dict[str, str]) -> None:
    assert (ROOT / words[0]).is_file(), f"no {words[0]}"


def _docker(words: list[str], variables: dict[str, str]) -> None:
    files = [ROOT / file for flag, file in itertools.pairwise(words) if flag == "-f"]
    assert files
    text = "".join(file.read_text() for file in files)
    if words[0] == "compose":
        assert words[-1] == "up"
        assert all(yaml.safe_load(file.read_text())["services"] for file in files)
        for name in variables:
            assert re.search(rf"\$\{{{name}\b", text), f"no variable {name} in {files[0].name}"
    else:
        assert words[0] == "build"
        target = words[words.index("--target") + 1]
        assert re.search(rf"^FROM .* AS {target}$", text, re.M), f"no stage {target}"


def _helm(words: list[str], variables: dict[str, str]) -> None:
    """Check the values of a documented helm command against the chart's schema.

    Rendering the chart is tested by deploy/check.py.
    """
    chart = ROOT / words[2]
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for flag, given in itertools.pairwise(words):
        if flag == "-f":
            values |= yaml.safe_load(Path(given).read_text())
        for each in given.split(",") if flag == "--set" else []:
            path, _, value = each.partition("=")
            *above, last = path.split(".")
            place = values
            for name in above:
                assert name in place, f"the chart has no {path}"
                place = place[name]
            assert last in place, f"the chart has no {path}"
            place[last] = yaml.safe_load(value)
    jsonschema.validate(values, json.loads((chart / "values.schema.json").read_text()))


def _install(words: list[str], variables: dict[str, str]) -> None:
    assert words[0] == "-d" or (ROOT / words[-2]).is_file(), words[-2]


def _printf(words: list[str], variables: dict[str, str]) -> None:
    """Check that the settings that a command writes for the systemd unit give a valid plan."""
    unit = (ROOT / "deploy/systemd/tonnage.service").read_text()
    assert f"EnvironmentFile={words[-1]}" in unit
    with pytest.MonkeyPatch.context() as environment:
        for word in words[1:-2]:
            name, _, value = word.partition("=")
            environment.setenv(name, value)
        settings = settings_from(parser_of("serve").parse_args([]))
        assert plan_for_loading(*select_backend(settings, io.StringIO()), io.StringIO()).fits


def _systemctl(words: list[str], variables: dict[str, str]) -> None:
    assert words == ["daemon-reload"] or (ROOT / f"deploy/systemd/{words[-1]}.service").is_file(), words


def _eval(words: list[str], variables: dict[str, str]) -> None:
    command = words[0].replace("$(tonnage", f"$({shlex.quote(sys.executable)} -m tonnage.server.cli")
    done = subprocess.run(
        ["bash", "-ec", f'script="{command}"; eval "$script"; complete -p tonnage'], capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def _git(words: list[str], variables: dict[str, str]) -> None:
    assert words[0] == "clone", words


def _cd(words: list[str], variables: dict[str, str]) -> None:
    assert words == ["tonnage"], "the folder that git clone makes"


def _vllm(words: list[str], variables: dict[str, str]) -> None:
    assert words[0] == "serve", words


CHECKS: dict[str, Callable[..., None]] = {
    "bash": _bash, "cd": _cd, "docker": _docker, "eval": _eval, "git": _git, "helm": _helm, "install": _install,
    "make": _make, "pip": _pip, "pipx": _uvx, "printf": _printf, "python": _python, "python3": _python,
    "systemctl": _systemctl, "tonnage": lambda words, variables: None, "uvx": _uvx, "vllm": _vllm,
}  # fmt: skip


def test_inline_code_that_begins_with_a_checked_program_is_recognized_as_a_command() -> None:
    assert set(CHECKS) - {"cd", "install", "printf"} <= set(PROGRAMS)  # words of prose, too
