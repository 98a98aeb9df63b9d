"""Tests of ``tonnage page --build``: files written, kept and rejected, and partial checkpoints."""

from __future__ import annotations

import hashlib
import json
import socket
import urllib.request
import zipfile
from threading import Thread
from typing import Any

import pytest

from tonnage.planner.errors import CheckpointError, DeploymentError
from tonnage.planner.headers import partial
from tonnage.planner.headers.safetensors import read_header
from tonnage.planner.page import browser, pyodide
from tonnage.planner.page.build import build
from tonnage.planner.page.command import run, server
from tonnage.planner.page.pyodide import PageError


@pytest.fixture
def runtime(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a folder with stand-in Pyodide files."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setattr(pyodide, "FILES", dict.fromkeys(pyodide.FILES, hashlib.sha256(b"as if").hexdigest()))
    for name in pyodide.FILES:
        (folder / name).write_bytes(b"as if")
    return str(folder)


def test_building_the_page_keeps_other_files_of_its_folder(tmp_path: Any, runtime: str) -> None:
    site = tmp_path / "site"
    for _ in range(2):
        build(site, runtime)
        assert (site / "pyodide" / "pyodide.mjs").is_file()
        with zipfile.ZipFile(site / "planner.zip") as archive:
            names = archive.namelist()
        assert "tonnage/planner/command.py" in names
        assert "tonnage/planner/devices/catalogue.json" in names
        assert not [name for name in names if "page/data" in name or ".." in name]
        (site / "CNAME").write_text("plans.example")
    assert (site / "CNAME").read_text() == "plans.example"
    assert not [path for path in tmp_path.iterdir() if path.name not in ("site", "runtime")]


def test_page_build_rejects_folder_with_other_files(tmp_path: Any, runtime: str, capsys: Any) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years")
    assert run(["--build", str(other), "--pyodide", runtime]) == 2
    assert "has other files in it" in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    assert run(["--build", str(other / "thesis.tex"), "--pyodide", runtime]) == 2
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "runtime" / "pyodide.mjs").write_text("another")
    with pytest.raises(PageError, match="is not the file of Pyodide"):
        build(tmp_path / "site", runtime)
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_page_server_answers_on_ipv4_and_ipv6(tmp_path: Any, host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    (tmp_path / "index.html").write_text("page")
    with server(tmp_path, host, 0) as serving:
        Thread(target=serving.handle_request, daemon=True).start()
        shown = f"[{host}]" if ":" in host else host
        with urllib.request.urlopen(f"http://{shown}:{serving.server_address[1]}/") as answer:
            assert answer.read() == b"page"
        with pytest.raises(DeploymentError, match="cannot listen"):
            server(tmp_path, host, int(serving.server_address[1]))


def test_header_of_a_partially_loaded_checkpoint_is_read_in_the_browser(tmp_path: Any) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(file)
    browser.register_partial(str(file), 8 + len(header) + 4000)
    try:
        assert read_header(file)[0].nbytes == 4000
    finally:
        partial._WHOLE.clear()


@pytest.mark.parametrize("port", ["99999", "-1", "http", "0x9"])
def test_invalid_page_port_is_rejected_before_download(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, port: str
) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    monkeypatch.setattr(pyodide, "SHIPPED", tmp_path / "none")
    assert run(["--port", port]) == 2
    said = f"tonnage: --port: '{port}' is not a port number (from 0 (a free one) to 65535)\n"
    assert capsys.readouterr().err == said
    assert not [*tmp_path.iterdir()]


def test_unwritable_cache_folder_is_named_in_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(pyodide, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(pyodide.shutil, "which", lambda name: name)
    assert run(["--build", str(tmp_path / "site")]) == 2
    said = capsys.readouterr().err
    assert "cannot be written: Not a directory (set TONNAGE_CACHE to a folder that can be written)" in said


def test_npm_download_error_quotes_npm(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text(
        "#!/bin/sh\n"
        "echo npm error code ENOSPC >&2; echo npm error syscall write >&2; echo npm error errno -28 >&2\n"
        "echo npm error nospc ENOSPC: no space left on device, write >&2\n"
        "echo npm error A complete log of this run can be found in: /a/file >&2; exit 228\n"
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        PageError, match=r"could not fetch pyodide [\d.]+: nospc ENOSPC: no space left on device"
    ):
        pyodide.fetch(tmp_path / "cache" / "pyodide")
