"""Conversion of the demo model's .gguf file to the files that transformers would save in bfloat16.

The module imports neither transformers nor torch, whose imports alone take longer than the conversion.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tonnage.planner.headers.gguf import GGUFHeader, read_gguf
from tonnage.planner.headers.gguf_config import config_from_gguf, state_dict_name

# Maximum number of items in an array of the GGUF header; vocabularies and merges of tokenizers have fewer.
_LONGEST = 2**20
_CONTROL = 3  # token type of special tokens: LLAMA_TOKEN_TYPE_CONTROL (llama.cpp, include/llama.h)
_PIECE = 2**20  # bytes of the .gguf file that are dequantized at a time


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, tokenizer and configs of a .gguf file to a new ``folder``.

    The model must be a Llama with a byte-level vocabulary.
    """
    header = read_gguf(gguf, _LONGEST)
    config = config_from_gguf(header, gguf.name)
    folder.mkdir()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pieces = pool.map(lambda piece: _bfloat16(*piece), _pieces(header, gguf, config))
        _save_configs(header.metadata, config, folder)
        _tokenizer(header.metadata).save(str(folder / "tokenizer.json"))
        with (folder / "model.safetensors").open("wb") as file:
            file.write(_safetensors_header(header, config["model_type"]))
            for piece in pieces:
                file.write(piece.data)


def _sorted(header: GGUFHeader, model_type: str) -> list[tuple[str, int]]:
    """Return each tensor's name and its index in ``header.tensors``, in the order of safetensors files."""
    return sorted((state_dict_name(each.name, model_type), at) for at, each in enumerate(header.tensors))


def _safetensors_header(header: GGUFHeader, model_type: str) -> bytes:
    """Return the header of a safetensors file (0.8): 8 bytes of length, then JSON padded to a multiple of 8."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, at in _sorted(header, model_type):
        shape = header.tensors[at].shape
        begin, end = end, end + 2 * prod(shape)
        described[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(
    header: GGUFHeader, gguf: Path, config: dict[str, Any]
) -> Iterator[tuple[NDArray[np.uint8], GGMLQuantizationType]]:
    """Yield the data of all tensors in the order of the safetensors file, in blocks of rows.

    Each block is a pair of an array [rows, bytes per row] and its quantization type.
    """
    data = np.memmap(gguf, np.uint8, "r", header.data_start)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for _, at in _sorted(header, config["model_type"]):
        tensor, offset = header.tensors[at], header.offsets[at]
        rows = data[offset : offset + tensor.nbytes].reshape(
            tensor.shape[0] if len(tensor.shape) > 1 else 1, -1
        )
        if count := heads.get(tensor.name.split(".")[-2]):
            # For rotary embeddings llama.cpp rotates adjacent pairs of values, and transformers pairs from the
            # two halves of a head. llama.cpp's converter therefore interleaved the rows of the halves
            # (convert_hf_to_gguf.py, permute). The next line restores the order of transformers.
            rows = rows.reshape(count, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        step = max(1, _PIECE // rows.shape[1])
        for row in range(0, len(rows), step):
            yield rows[row : row + step], GGMLQuantizationType[tensor.dtype]


def _bfloat16(rows: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.uint16]:
    """Return quantized tensor rows dequantized to bfloat16 bits, rounded to nearest even as torch does.

    No value may be NaN, which this rounding could turn into infinity.
    """
    values = rows.view(np.float32) if kind == GGMLQuantizationType.F32 else dequantize(rows, kind)
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer in the .gguf file's metadata.

    It equals the tokenizer that transformers makes (5.19, integrations/gguf/gguf_tokenizer_mapping.py).
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL]
    )
    return tokenizer


def _save_configs(metadata: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    def given(key: str) -> Any:
        return metadata[f"{config['model_type']}.{key}"]

    # transformers' name of a special token -> GGUF's name
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {f"{name}_token_id": metadata[f"tokenizer.ggml.{theirs}_token_id"] for name, theirs in names.items()}
    rope = {"rope_theta": given("rope.freq_base"), "rope_type": "default"}
    more = {"rms_norm_eps": given("attention.layer_norm_rms_epsilon"), "rope_parameters": rope}
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {f"{name}_token": tokens[ids[f"{name}_token_id"]] for name in names}
    contents = {
        "config.json": {**config, **more, **ids, "dtype": "bfloat16"},
        "generation_config.json": {
            name: ids[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
        "tokenizer_config.json": {"tokenizer_class": "TokenizersBackend", **special},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])
