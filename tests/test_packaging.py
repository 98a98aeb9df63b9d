"""The wheel carries every file of the three packages, and works where nothing else of the project is."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tonnage.cache.ahead import level_here
from tonnage.server.engines.hf.ahead import is_there

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("planner", "cache", "server")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TONNAGE_CACHE")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env | environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the tracked files, so that untracked files of the checkout cannot help."""
    source = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", "-z", cwd=ROOT)
    assert listed.returncode == 0, listed.stderr
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("wheel"))


def build(source: Path, out: Path) -> Path:
    built = run(sys.executable, "-m", "build", "--wheel", "--outdir", out, source, cwd=source)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (found,) = out.glob("*.whl")
    return found


def test_wheel_has_exactly_the_tracked_files(wheel: Path) -> None:
    tracked = run("git", "ls-files", "-z", *PACKAGES, cwd=ROOT).stdout.split("\0")
    names = {name for name in tracked if name and (ROOT / name).is_file()}
    expected = {f"tonnage/{name.removeprefix('planner/_tonnage/')}" for name in names}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {"tonnage/py.typed", *(f"tonnage/{package}/py.typed" for package in PACKAGES)} <= found


def test_vllm_entry_points_are_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (written,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(written).decode())
        for group in ("vllm.general_plugins", "vllm.stat_logger_plugins"):
            module, _, name = entries[group]["tonnage"].partition(":")
            assert f"{name}" in archive.read(f"{module.replace('.', '/')}.py").decode()


MANAGER = """
import json
from tonnage.cache.compiled import COMPILER
from tonnage.cache.warm import compile_manager
from tonnage.server.engines.hf.ahead import PARTS
compile_manager(PARTS["manager"][0].layout)
stats = [made.stats for made in COMPILER.made]
print(json.dumps([sum(sum(each.cache_hits.values()) for each in stats),
                  sum(sum(each.cache_misses.values()) for each in stats)]))
"""


def test_wheel_contains_precompiled_machine_code(source: Path, tmp_path: Path) -> None:
    """Where it is installed, the block manager starts without the compiler."""
    level = level_here()
    if level is None or not is_there(level, ["manager"]):
        pytest.skip("python -m tonnage.server.engines.hf.ahead has not compiled these sources")
    with_code = tmp_path / "source"
    shutil.copytree(source, with_code)
    (with_code / "cache" / "machine_code").mkdir()
    shutil.copy(level.path, with_code / "cache" / "machine_code")
    with zipfile.ZipFile(build(with_code, tmp_path / "wheel")) as wheel:
        wheel.extractall(tmp_path / "installed")
    started = run(
        sys.executable, "-c", MANAGER, cwd=tmp_path,
        PYTHONPATH=str(tmp_path / "installed"), NUMBA_CACHE_DIR=str(tmp_path / "numba"),
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    read, compiled = json.loads(started.stdout)
    assert read > 0
    assert compiled == 0
    assert not list(tmp_path.rglob("*.nbc"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin of a clean environment with the wheel and no dependency: planning needs none."""
    return environment(tmp_path_factory.mktemp("environment"), wheel)


def environment(home: Path, *installed: str | Path) -> Path:
    """bin of a new environment with ``installed`` and none of its dependencies."""
    venv.create(home, with_pip=True)
    done = run(home / "bin" / "python", "-m", "pip", "install", "--no-deps", "--quiet", *installed, cwd=home)
    assert done.returncode == 0, done.stderr
    return home / "bin"


WHERE = """
import json, tonnage, tonnage.cache, tonnage.planner, tonnage.server
from importlib.metadata import version
files = [part.__file__ for part in (tonnage, tonnage.planner, tonnage.cache, tonnage.server)]
print(json.dumps([tonnage.__version__, version("tonnage"), *files]))
"""


def where(python: Path, cwd: Path, first: str = "") -> tuple[str, str, list[str]]:
    """tonnage.__version__, that of the distribution, and the files of tonnage and its packages."""
    done = run(python, "-c", first + WHERE, cwd=cwd)
    assert done.returncode == 0, done.stderr
    version, distribution, *files = json.loads(done.stdout)
    return version, distribution, files


def test_plan_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(
        installed / "tonnage", "plan", "demo", "--json", cwd=tmp_path, TONNAGE_CACHE=str(tmp_path / "cache")
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["model"]["parameters"] == 134_515_008
    assert plan["fits"] is True


def test_help_and_version_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "tonnage", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("plan", "serve", "verify", "demo"))
    assert run(installed / "tonnage", "--version", cwd=tmp_path).stdout.startswith("tonnage ")


def test_version_is_found_in_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    version, distribution, files = where(installed / "python", tmp_path)
    assert version == distribution
    assert run(installed / "tonnage", "--version", cwd=tmp_path).stdout == f"tonnage {version}\n"
    top = Path(files[0]).parent
    assert [Path(file) for file in files[1:]] == [top / package / "__init__.py" for package in PACKAGES]


def test_version_is_found_in_a_zipped_wheel(wheel: Path, tmp_path: Path) -> None:
    """As zipimport finds it: the version is no file to be opened."""
    first = f"import sys; sys.path.insert(0, {str(wheel)!r})"
    version, distribution, files = where(Path(sys.executable), tmp_path, first)
    assert version == distribution == wheel.name.split("-")[1]
    assert files == [f"{wheel}/tonnage/{name}__init__.py" for name in ("", *(f"{one}/" for one in PACKAGES))]


def test_version_is_found_in_an_editable_install(source: Path, tmp_path: Path) -> None:
    """Its finder maps four folders that lie elsewhere, as in the environment that make builds."""
    tools = environment(tmp_path / "environment", "-e", source)
    version, distribution, files = where(tools / "python", tmp_path)
    assert version == distribution
    assert files == [f"{source}/{folder}/__init__.py" for folder in ("planner/_tonnage", *PACKAGES)]
    done = run(tools / "tonnage", "plan", "demo", "--json", cwd=tmp_path, TONNAGE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("serve demo", "hf"),
        ("verify demo --json", "vllm"),
        ("replay trace.csv --model demo", "replay"),
        ("plan demo --replicas auto --rate 1 --trace trace.csv", "replay"),
        ("watch http://localhost:1", "server"),
        ("doctor", "server"),
        ("demo", "demo"),
    ],
)
def test_command_without_its_extra_names_the_extra_before_doing_anything(
    installed: Path, tmp_path: Path, arguments: str, extra: str
) -> None:
    done = run(installed / "tonnage", *arguments.split(), cwd=tmp_path, TONNAGE_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tonnage: ")
    assert done.stderr.count("\n") == 1
    assert f"'tonnage[{extra}]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_planner_commands_run_without_any_extra(installed: Path, tmp_path: Path) -> None:
    """And the module is the command."""
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,100,10\n")
    log = ROOT / "tests" / "data" / "startup_logs" / "meta-llama-llama-3-1-8b---h100-80gb--tp1pp4dp1--8192.log"
    config = ROOT / "tests" / "data" / "configs" / "meta-llama__Meta-Llama-3.1-8B.json"
    for arguments in (
        ["plan", "demo", "--gpu", "l4", "--trace", "trace.csv"],
        ["train", "demo", "--gpu", "l4"],
        ["dtype", "1.5"],
        ["serve", "--help"],
        ["status", "--help"],
        ["fit-log", str(log), "--model", str(config)],
    ):
        done = run(installed / "python", "-m", "tonnage", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_committed_list_of_python_packages_equals_the_generated_one() -> None:
    done = run(sys.executable, ROOT / ".ci" / "packages.py", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stderr
