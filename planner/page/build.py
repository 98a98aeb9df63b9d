"""Builder of the web page, a folder of static files for any web server."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import tonnage.planner
from tonnage.planner.page.pyodide import FILES, PageError, pyodide_folder

_DATA = Path(__file__).parent / "data"
_FIELD = "--build"
_KEEPER = "offline.js"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # A fixed time stamp makes the zip archive reproducible.


def build(folder: Path, pyodide: str | None = None, *, kept: bool = False) -> None:
    """Write the files of the web page into a new or empty folder, or over an older page.

    Args:
        folder: the folder to write.
        pyodide: a folder with Pyodide's files; None uses the shipped or cached ones.
        kept: whether a service worker stores the page in the browser, so that the page opens offline.

    Raises:
        PageError: the folder has other files or cannot be written, or Pyodide is missing. Nothing is written if
            a check fails.
    """
    source = pyodide_folder(pyodide)
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "planner.zip").is_file():
            raise PageError(f"{folder} has other files in it", field=_FIELD, hint="give a new or empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            made = Path(place)
            _write(made)
            (made / "pyodide").mkdir()
            for name in FILES:
                shutil.copyfile(source / name, made / "pyodide" / name)
            if kept:
                _keep(made)
            (folder / "pyodide").mkdir(parents=True, exist_ok=True)
            # Replace an older page's files one by one; the folder's other files stay.
            for path in [path for path in made.rglob("*") if path.is_file()]:
                os.replace(path, folder / path.relative_to(made))
    except OSError as error:
        raise PageError(f"cannot be written: {error.strerror}", field=_FIELD, hint=str(folder)) from None


def _write(made: Path) -> None:
    for path in _DATA.iterdir():
        if path.suffix in (".html", ".css", ".js") and path.name != _KEEPER:
            shutil.copyfile(path, made / path.name)
    _zip(made / "planner.zip", planner_files())
    _zip(made / "models.zip", model_files())


def _keep(made: Path) -> None:
    """Add a service worker to the web page in `made`, so that the browser stores the page's files."""
    names = ["./", *sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())]
    for path, empty, full in (
        (_DATA / _KEEPER, "const FILES = [];", f"const FILES = {json.dumps(names)};"),
        (made / "index.html", '<html lang="en">', f'<html lang="en" data-keeper="{_KEEPER}">'),
    ):
        text = path.read_text()
        assert empty in text, path.name
        (made / path.name).write_text(text.replace(empty, full))


def planner_files() -> dict[str, bytes]:
    """Return the planner's Python and JSON files by their paths in the zip archive that the web page loads.

    The folder with the data of the web page itself is left out.
    """
    root = Path(tonnage.planner.__file__).parent
    files = {
        f"tonnage/planner/{path.relative_to(root)}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix in (".py", ".json") and _DATA not in path.parents and "_tonnage" not in path.parts
    }
    # The file tonnage/__init__.py lies beside the planner in a wheel, and in _tonnage in a checkout.
    for first in (root.parent / "__init__.py", root / "_tonnage" / "__init__.py"):
        if first.is_file():
            files["tonnage/__init__.py"] = first.read_bytes()
    return files


def model_files() -> dict[str, bytes]:
    """Return the config.json files of the models that the web page offers, by path `org/name/config.json`."""
    found = sorted((_DATA / "models").glob("*.json"))
    return {f"{path.stem.replace('__', '/', 1)}/config.json": path.read_bytes() for path in found}


def _zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
