"""server -> cache -> planner, never back; what each may import; no second copy of a module."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("planner", "cache", "server")
HEAVY = {"torch", "transformers", "numpy", "vllm", "fastapi", "pydantic", "uvicorn", "safetensors", "gguf"}


def loaded_by(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def modules(package: str) -> list[str]:
    """Dotted names of all modules of planner, cache or server."""
    names = []
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append("tonnage." + ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_imports_between_packages_keep_the_layer_contracts(tmp_path: Path) -> None:
    """Over the packages side by side: import-linter takes a package below another only in a namespace."""
    (tmp_path / "tonnage").mkdir()
    for package in PACKAGES:
        (tmp_path / "tonnage" / package).symlink_to(ROOT / package)
    tool = Path(sys.executable).parent / "lint-imports"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"{len(contracts)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "above", "told"),
    [
        ("planner/units.py", "tonnage.cache.errors", "tonnage.planner.units -> tonnage.cache.errors"),
        (
            "planner/plans.py",
            "tonnage.planner.planning.build",
            "tonnage.planner.plans -> tonnage.planner.planning.build",
        ),
        (
            "planner/engines/pool.py",
            "tonnage.planner.engines.base",
            "cycles are allowed in tonnage.planner.engines",
        ),
        ("server/errors.py", "tonnage.server.app", "tonnage.server.errors -> tonnage.server.app"),
        (
            "server/engines/chunk.py",
            "tonnage.server.engines.base",
            "cycles are allowed in tonnage.server.engines",
        ),
    ],
)
def test_layer_contracts_detect_a_forbidden_import(tmp_path: Path, module: str, above: str, told: str) -> None:
    """The same contracts over a copy in which ``module`` looks up, or back."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / "tonnage" / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "tonnage" / module).open("a") as file:
        file.write(f"\nimport {above}\n")
    # Python's finder of the editable install comes after the path, so the copy is what is found.
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; "
    code += "sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert told in " ".join(done.stdout.split())


def test_planner_imports_no_heavy_modules() -> None:
    imports = "\n".join(f"import {name}" for name in modules("planner"))
    assert not loaded_by(imports) & HEAVY


def test_cache_imports_no_torch() -> None:
    imports = "\n".join(f"import {name}" for name in modules("cache"))
    assert not loaded_by(imports) & (HEAVY - {"numpy"})


def test_api_process_imports_no_torch() -> None:
    imports = "import tonnage.server.app, tonnage.server.commands.serve, tonnage.server.engines.hf"
    assert not loaded_by(imports) & {"torch", "transformers", "vllm"}


def test_api_imports_no_compiler_before_an_engine_starts() -> None:
    assert not loaded_by("import tonnage.server.commands.serve") & {"numba", "llvmlite"}


@pytest.mark.parametrize("command", ["--help", "--version", "plan"])
def test_command_line_start_imports_no_heavy_modules(command: str) -> None:
    arguments = [command, "demo", "--json"] if command == "plan" else [command]
    code = (
        "import contextlib, io\nfrom tonnage.server.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()): assert main({arguments!r}) == 0"
    )
    assert not loaded_by(code) & HEAVY


def test_top_level_folders_are_not_imported_by_their_bare_name() -> None:
    """From the repository root ``import planner`` would succeed, as a second copy of every module."""
    found = []
    for folder in (*PACKAGES, "tests", "benchmarks", "deploy", ".ci"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                found += [
                    f"{path}: {name}" for name in names if name.split(".")[0] in ("planner", "cache", "server")
                ]
    assert found == []


def test_ruff_rejects_bare_imports_of_top_level_folders() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "ruff", "check", "--stdin-filename", "server/x.py", "-"],
        input="import planner.plan\n\nprint(planner.plan)\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "TID251" in done.stdout


def late_imports(node: ast.AST, inside: bool = False) -> Iterator[int]:
    """Yield the line numbers of imports inside functions, except imports that expect an ImportError."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom) and inside:
            yield child.lineno
        elif isinstance(child, ast.Try) and any("ImportError" in ast.unparse(h) for h in child.handlers):
            continue
        else:
            yield from late_imports(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_import_inside_a_function_has_a_comment_with_its_reason() -> None:
    """By a comment on the line or above it, for each group of lines."""
    silent = []
    for path in sorted((ROOT / "server").rglob("*.py")):
        lines = path.read_text().splitlines()
        numbers = set(late_imports(ast.parse("\n".join(lines))))
        silent += [
            f"{path.relative_to(ROOT)}:{number}: {lines[number - 1].strip()}"
            for number in sorted(numbers)
            if number - 1 not in numbers
            and "#" not in lines[number - 1]
            and not lines[number - 2].strip().startswith("#")
        ]
    assert silent == []
