"""Files of Pyodide, the web page's Python interpreter: search for an installed copy, or fetch by npm."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tonnage.planner.errors import TonnageError
from tonnage.planner.source.resolve import cache_folder

VERSION = "314.0.7"
# Files of the npm package `pyodide` that the web page loads, with their SHA-256.
FILES = {
    "pyodide.mjs": "6f1d60f7bf529beb300f0f47983c921d3982363640ba20af0e38efdddbc66109",
    "pyodide.asm.mjs": "f7cdc8ece80678ceb712f8e65ebe6d3a83203a180c399865f49612a051693635",
    "pyodide.asm.wasm": "cc36e3cab04fdfc9a63ff13eb52eae2b911bf46c025cc7b281f394bd3de1d5e6",
    "python_stdlib.zip": "fa1957e5777068fc4f7437f96d860ae2fbe9c19732ba06c84e004ec16dd7dd7a",
    "pyodide-lock.json": "5dc2fc119108bc148c7457dc86e7675b5c87e1cafd420b9c34c1eaef7b36c010",
}
# folder of the shipped Pyodide files, which `make pyodide` fills before a build
SHIPPED = Path(__file__).parent / "data" / "pyodide"


class PageError(TonnageError):
    """Error for a web page that cannot be written, or for missing Pyodide files."""


def pyodide_folder(given: str | None = None) -> Path:
    """Return a folder with Pyodide's files: `given`, else the shipped folder, else the user's cache.

    Raises:
        PageError: a file is missing or of another version, or npm is needed and missing.
    """
    if given is not None:
        return checked(Path(given))
    try:
        return present()
    except PageError:
        fetch(_cached())
        return checked(_cached())


def present() -> Path:
    """Return the shipped or cached folder with Pyodide's files, without fetching anything.

    Raises:
        PageError: no such folder exists, or a file is of another version.
    """
    for folder in (SHIPPED, _cached()):
        if folder.is_dir():
            return checked(folder)
    raise PageError(
        f"Pyodide {VERSION} is not installed",
        field="--pyodide",
        hint="run `tonnage page` once: it fetches Pyodide",
    )


def _cached() -> Path:
    return cache_folder() / f"pyodide-{VERSION}"


def checked(folder: Path) -> Path:
    """Return `folder` if it has all Pyodide files of the required version; raise PageError otherwise."""
    for name, digest in FILES.items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise PageError(
                f"{folder / name}: {error.strerror}",
                field="--pyodide",
                hint=f"give a folder with the npm package pyodide {VERSION}",
            ) from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise PageError(f"{folder / name} is not the file of Pyodide {VERSION}", field="--pyodide")
    return folder


def fetch(folder: Path) -> None:
    """Fetch Pyodide (6 MB) by npm into a folder; a failure leaves no partial folder.

    Raises:
        PageError: npm is missing or fails, or the folder cannot be written.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise PageError(
            f"Pyodide {VERSION}, which runs the planner in a browser, is not in this installation, and "
            "there is no npm to fetch it with",
            field="--pyodide",
            hint=f"install npm once, or give a folder with the npm package pyodide {VERSION}",
        )
    print(f"Fetching Pyodide {VERSION} (6 MB, once) into {folder}", file=sys.stderr, flush=True)
    try:
        _fill(folder, npm)
    except OSError as error:  # the user may lack permission, or the disk may be full
        raise PageError(
            f"{folder} cannot be written: {error.strerror}", field="--pyodide",
            hint="set TONNAGE_CACHE to a folder that can be written",
        ) from None  # fmt: skip


def _fill(folder: Path, npm: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        command = [npm, "pack", f"pyodide@{VERSION}", "--loglevel", "error", "--pack-destination", place]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
        archives = list(Path(place).glob("*.tgz"))
        if done.returncode or not archives:
            raise PageError(f"npm could not fetch pyodide {VERSION}: {_why(done.stderr)}", field="--pyodide")
        made = Path(place) / "pyodide"
        made.mkdir()
        with tarfile.open(archives[0]) as archive:
            for name in FILES:
                if (member := archive.extractfile(f"package/{name}")) is not None:
                    (made / name).write_bytes(member.read())
        checked(made)
        shutil.rmtree(folder, ignore_errors=True)  # A damaged folder from an earlier run may exist.
        made.rename(folder)


def _why(said: str) -> str:
    """Return the first sentence of npm's error output, without error codes and stack traces."""
    lines = [line.removeprefix("npm error ").strip() for line in said.splitlines()]
    sentences = [line for line in lines if line and not line.startswith(("code ", "syscall ", "errno "))]
    return sentences[0] if sentences else "no word"
