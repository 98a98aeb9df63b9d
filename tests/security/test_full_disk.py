"""A full disk or an unwritable folder costs time or one log line, and no response."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import numba
import pytest
from serving import PATIENCE

from tonnage.cache.compiled import Compiler
from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.source.resolve import demo_folder
from tonnage.server.app import create_app
from tonnage.server.demo.model import DemoModelError, ensure_demo
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.settings import Settings


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """``said(about)``: what the log says of it."""
    monkeypatch.setattr(logging.getLogger("tonnage"), "propagate", True)  # a test before may have set it up
    caplog.set_level(logging.WARNING)
    return lambda about: [message for message in caplog.messages if about in message]


async def test_request_succeeds_although_the_disk_of_the_request_log_is_full(
    said: Callable[[str], list[str]],
) -> None:
    ensure_demo()
    plan = make_plan("demo", Deployment(kv_cache_memory_bytes=64 << 20, max_model_len=512, max_num_seqs=8))
    app = create_app(Settings(model="demo", request_log=Path("/dev/full")), FakeEngine(plan))
    state = app.state.tonnage
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http,
    ):
        await state._loading
        body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
        for _ in range(3):
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 3
        streamed = await http.post("/v1/completions", json=body | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert "error" not in streamed.text
        state.accounts.check()
        assert state.accounts.outcomes["length"] == 4
    assert said("request log") == [
        f"cannot write the request log: {os.strerror(errno.ENOSPC)}; requests are answered without it"
    ]


FULL_FOR_A_WHILE = """
import resource, sys
from pathlib import Path
from tonnage.server.observe.request_log import RequestLog
path = Path(sys.argv[1])
log = RequestLog(path, 16)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
log._append('{"number": 1}')
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
log._append('{"number": 2}')
log._append('{"number": 3}')
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log._append('{"number": 4}')
log._append('{"number": 5}')
log.close()
print(log.lost)
"""


def test_request_log_resumes_on_a_new_line_after_the_disk_was_full(tmp_path: Path) -> None:
    """The half of a line stays alone, what comes after it is whole."""
    path = tmp_path / "requests.jsonl"
    done = run(FULL_FOR_A_WHILE, str(path))
    assert done.stdout == "2\n", done.stderr
    assert done.stderr.splitlines() == [
        f"cannot write the request log: {os.strerror(errno.EFBIG)}; requests are answered without it",
        "the request log can be written again; lines lost so far: 2",
    ]
    first, torn, *rest = path.read_text().splitlines()
    assert json.loads(first) == {"number": 1}
    assert torn == '{"num'
    assert [json.loads(line)["number"] for line in rest] == [4, 5]


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``script`` in a process of its own, with none of the tests' folders unless given."""
    unset = ("HOME", "XDG_CACHE_HOME", "TONNAGE_CACHE", "NUMBA_CACHE_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=kept | environment)


def add(value: int) -> int:
    return value + 1


def add_more(value: int) -> int:
    return value + 2


def test_unwritable_cache_directory_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[str], list[str]]
) -> None:
    """What the folder itself allows may be refused below it: no inode left, another user's."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiler = Compiler(tmp_path)
    assert compiler.folder is not None
    below = Path(compiler(add)._cache.cache_path)  # type: ignore[attr-defined]
    assert compiler.folder in below.parents
    below.rmdir()
    below.touch()
    assert compiler(add_more)(1) == 3
    assert not compiler.kept
    assert compiler(add)(1) == 2
    assert len(said("every start compiles again")) == 1


WITHOUT_SPACE = """
import resource, sys
from pathlib import Path
from tonnage.cache.compiled import Compiler
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
module = Path(sys.argv[1]) / "module.py"
scope = {}
exec(compile(module.read_text(), str(module), "exec"), scope)
compiler = Compiler(Path(sys.argv[1]))
assert compiler.folder is not None
one, two = compiler(scope["one"]), compiler(scope["two"])
print(one(1), two(1), compiler.kept)
"""


def test_code_is_compiled_and_runs_without_disk_space_to_cache_it(tmp_path: Path) -> None:
    """No byte fits: a process whose files may not grow stands for a full disk."""
    (tmp_path / "module.py").write_text("def one(x):\n    return x + 1\n\ndef two(x):\n    return x + 2\n")
    done = run(WITHOUT_SPACE, str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "kept"))
    assert done.stdout == "2 3 False\n", done.stderr
    assert done.stderr.count("every start compiles again") == 1
    assert "Traceback" not in done.stderr


NO_HOME = """
import pwd
def unknown_user(number):
    raise KeyError(number)
pwd.getpwuid = unknown_user
from tonnage.cache.compiled import COMPILER
assert COMPILER.folder is None
from tonnage.server.cli import main
raise SystemExit(main(["plan", "demo", "--gpu", "h100-80g"]))
"""


def test_missing_home_directory_gives_a_one_line_error(tmp_path: Path) -> None:
    """As in a container that runs under a user id of its own choice."""
    done = run(NO_HOME)
    assert (done.returncode, done.stdout) == (2, "")
    assert "this user has no home directory for the cache (set TONNAGE_CACHE to a folder)" in done.stderr
    assert "Traceback" not in done.stderr
    done = run(NO_HOME, TONNAGE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_lock_file_that_cannot_be_created_gives_an_error_naming_the_cache_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model's folder is there and takes no file."""
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    folder = demo_folder()
    (folder.parent / f".{folder.name}.lock").mkdir(parents=True)
    with pytest.raises(DemoModelError, match=r"cannot write the demo model to .*TONNAGE_CACHE"):
        ensure_demo()


NO_SPACE = """
import resource, sys
from tonnage.server.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has none")
@pytest.mark.parametrize(
    "words", [["plan", "demo", "--gpu", "l4"], ["plan", "--help"], ["--version"], ["dtype"]]
)
def test_output_to_a_full_disk_is_a_one_line_error(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tonnage.server.cli", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    said = "tonnage: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_failed_write_leaves_no_partial_file(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [sys.executable, "-c", NO_SPACE, "4096", "plan", "demo", "--gpu", "l4", "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        f"tonnage: --html: cannot be written: File too large ({page})\n",
    )
    assert not page.exists()
    log = (
        Path(__file__).parents[1] / "data/startup_logs/meta-llama---h100-80gb--tp1pp1dp1--8192-dtbf16-kvfp8.log"
    )
    kept = tmp_path / "kept.json"
    options = ["--model", str(model_of(tmp_path)), "--gpu", "h100-80g", "--calibrate", str(kept)]
    done = subprocess.run(
        [sys.executable, "-c", NO_SPACE, "64", "fit-log", str(log), *options], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, f"tonnage: --calibrate: {kept}: File too large\n")
    assert not [*tmp_path.glob("kept*")]


def model_of(folder: Path) -> Path:
    config = Path(__file__).parents[1] / "data/configs/meta-llama__Meta-Llama-3.1-8B.json"
    (folder / "config.json").write_bytes(config.read_bytes())
    return folder
