"""The tokenizer of a .gguf file as tokenizer.json, converted once by transformers in a separate process.

The process runs ``python -m tonnage.server.text.gguf_tokenizer FILE FOLDER``. It is separate, because the API
process must not import torch.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tonnage.planner.errors import CheckpointError
from tonnage.planner.source.resolve import cache_folder


def model_files(path: str) -> Path:
    """Return the folder with the tokenizer.json and configs of the model at ``path``.

    It is the model's own folder, or the folder that contains the .gguf file. Without a tokenizer.json there, it
    is a folder in the cache, made on first use.

    Raises:
        CheckpointError: transformers cannot read the file's tokenizer, or the cache cannot be written.
    """
    given = Path(path)
    if given.suffix.lower() != ".gguf":
        return given
    if (given.parent / "tokenizer.json").is_file():
        return given.parent
    stat = given.stat()
    what = f"{given.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    made = cache_folder() / "tokenizers" / f"{given.stem}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    if (made / "tokenizer.json").is_file():
        return made
    try:
        _make(given, made)
    except OSError as error:
        raise CheckpointError(
            f"cannot save the tokenizer of {given.name} in {made.parent}: {error.strerror or error}",
            hint="set TONNAGE_CACHE to another folder, or put the model's tokenizer.json beside the file",
        ) from None
    return made


def _make(given: Path, made: Path) -> None:
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent, prefix=".partial-") as work:
        command = [sys.executable, "-m", "tonnage.server.text.gguf_tokenizer", str(given), f"{work}/made"]
        print(f"Reading the tokenizer of {given.name} (once)", file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            messages = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise CheckpointError(
                f"transformers cannot read the tokenizer of {given.name}: {messages[-1][:300]}",
                field="tokenizer.ggml.tokens",
                hint="put the model's tokenizer.json beside the file",
            )
        try:
            Path(work, "made").rename(made)
        except OSError:  # another process has written the converted tokenizer's folder in the meantime
            if not (made / "tokenizer.json").is_file():
                raise


def main(gguf: Path, folder: Path) -> None:
    """Convert the tokenizer of the .gguf file ``gguf`` and save it with its EOS token ids in ``folder``."""
    # imported here, because transformers imports torch, which only the process that converts may load
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    ends = {} if tokenizer.eos_token_id is None else {"eos_token_id": tokenizer.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
