"""Measure ``pip install tonnage`` in an empty environment: bytes, packages, seconds, and the first plan.

    python benchmarks/install.py [--extra NAME ...] [--wheel FILE] [--json]

It first builds a wheel of the tracked files, which is not counted, or uses --wheel from `make wheel`.
``seconds`` is the duration of pip: its start, the index, the downloads (or its cache) and the bytecode.
``cpu_seconds`` is its processor time. ``bytes`` is the growth of the environment. ``first_plan_ms`` and
``second_plan_ms`` time `tonnage plan demo --gpu l4` in the first process and in the next. --extra also
installs these extras; `hf` needs gigabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("pyproject.toml", "README.md", "LICENSE", "planner", "cache", "server")  # sources of a wheel
AIM = {"bytes": 15 * 10**6, "seconds": 10.0}
OURS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # variables that child processes do not inherit
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OURS}


def wheel(folder: Path) -> Path:
    """Build a wheel of the tracked files and return its path."""
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "wheel", source]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (found,) = (folder / "wheel").glob("*.whl")
    return found


def held(folder: Path) -> int:
    """Return the total bytes of the files in ``folder``."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def children_seconds() -> float:
    """Return the processor seconds of ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed_plan(folder: Path) -> float:
    """Run `tonnage plan demo --gpu l4` in the environment and return its milliseconds."""
    command = [folder / "environment" / "bin" / "tonnage", "plan", "demo", "--gpu", "l4"]
    environment = ENVIRONMENT | {"TONNAGE_CACHE": str(folder / "cache")}
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=folder)
    return round(1000 * (time.perf_counter() - begun), 1)


def measure(folder: Path, package: Path, extras: list[str]) -> dict[str, object]:
    """Install ``package`` with ``extras`` into a new environment and return sizes, times and packages."""
    venv.create(folder / "environment", with_pip=True)
    before, begun, used = held(folder / "environment"), time.perf_counter(), children_seconds()
    pip = [folder / "environment" / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    asked = f"{package}[{','.join(extras)}]" if extras else str(package)
    subprocess.run([*pip, "install", "--quiet", asked], check=True, env=ENVIRONMENT, cwd=folder)
    seconds, cpu_seconds = time.perf_counter() - begun, children_seconds() - used
    size = held(folder / "environment") - before
    listed = subprocess.run(
        [*pip, "list", "--format", "json"], check=True, capture_output=True, env=ENVIRONMENT
    )
    packages = {found["name"]: found["version"] for found in json.loads(listed.stdout)}
    return {
        "extras": extras,
        "bytes": size,
        "wheel_bytes": package.stat().st_size,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "packages": {name: packages[name] for name in sorted(packages.keys() - {"pip", "setuptools"})},
        "first_plan_ms": timed_plan(folder),
        "second_plan_ms": timed_plan(folder),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Build, install, measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", default=[], metavar="NAME", help="also install this extra")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="install this wheel")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        package = arguments.wheel.resolve() if arguments.wheel else wheel(Path(folder))
        found = measure(Path(folder), package, arguments.extra)
    if not arguments.json:
        for name, aim in AIM.items():
            print(f"{name:<8} {found[name]:>14,}" + ("" if arguments.extra else f"   aim {aim:,}"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
