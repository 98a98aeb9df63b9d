"""Tests of the safetensors header reader, on real files and on invalid headers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tonnage.planner.errors import CheckpointError
from tonnage.planner.headers.index import Checkpoint, CheckpointIndex, read_folder
from tonnage.planner.headers.safetensors import read_header

TENSORS = {
    "a": torch.zeros(3, 4, dtype=torch.bfloat16),
    "b": torch.zeros(5),
    "c": torch.zeros(2, dtype=torch.int8),
}


@pytest.fixture
def real(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def write(path, header, data: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_header_of_safetensors_file_is_read(real):
    found = {t.name: (t.dtype, t.shape, t.nbytes) for t in read_header(real)}
    assert found == {"a": ("BF16", (3, 4), 24), "b": ("F32", (5,), 20), "c": ("I8", (2,), 2)}


def test_truncated_safetensors_file_is_rejected(real):
    data = real.read_bytes()
    for length in range(len(data)):
        real.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_header(real)


@pytest.mark.parametrize("claim", [10 * 10**9, 100_000_001, 2**64 - 1])
def test_oversized_header_length_is_rejected_without_reading(tmp_path, claim):
    path = write(tmp_path / "model.safetensors", b"{}", length=claim)
    with pytest.raises(CheckpointError, match=f"claims a header of {claim:,} bytes"):
        read_header(path)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        ({"a": 3}, "the tensor's entry in the header is not a JSON object"),
        ({"a": entry(dtype="F33")}, "dtype 'F33'"),
        ({"a": entry(dtype=None)}, "dtype"),
        ({"a": entry(shape=(-2,))}, "shape"),
        ({"a": entry(shape=(2.0,))}, "shape"),
        ({"a": entry(shape=(True, 2))}, "shape"),
        ({"a": entry(offsets=(8, 0))}, "in order"),
        ({"a": entry(offsets=(0,))}, "in order"),
        ({"a": entry(shape=(3,))}, "takes 12 bytes"),
        ({"a": entry(), "b": entry()}, "overlaps"),
        ({"a": entry(offsets=(4, 12))}, "hole"),
        ({"a": entry(), "b": entry(offsets=(8, 16))}, "16 bytes of tensors"),
        ({}, "0 bytes of tensors"),
    ],
)
def test_invalid_safetensors_header_is_rejected(tmp_path, header, match):
    with pytest.raises(CheckpointError, match=match):
        read_header(write(tmp_path / "model.safetensors", header, bytes(8)))


def test_zero_sized_tensors_are_accepted(tmp_path):
    header = {"empty": entry(shape=(0, 3), offsets=(0, 0)), "a": entry()}
    assert len(read_header(write(tmp_path / "model.safetensors", header, bytes(8)))) == 2


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "model-2.safetensors")
    return tmp_path


def index(folder, **weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_checkpoint_headers_are_merged(sharded):
    index(sharded, a="model-1.safetensors", b="model-2.safetensors")
    tensors = read_folder(sharded).tensors
    assert tensors is not None
    assert [t.name for t in tensors] == ["a", "b"]


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "model-1.safetensors", "b": "model-3.safetensors"}, "model-3.safetensors is missing"),
        (
            {"a": "model-1.safetensors", "x": "model-2.safetensors"},
            "b of model-2.safetensors is not in the index",
        ),
        ({"a": "model-1.safetensors", "z": "model-1.safetensors"}, "z is in no shard"),
        ({"a": "../model-1.safetensors"}, "points outside"),
        ({"a": 3}, "no weight_map"),
    ],
)
def test_checkpoint_index_that_contradicts_the_shards_is_rejected(sharded, weight_map, match):
    index(sharded, **weight_map)
    with pytest.raises(CheckpointError, match=match):
        read_folder(sharded)


def test_folder_without_safetensors_has_no_headers(tmp_path):
    assert read_folder(tmp_path) == Checkpoint()


@pytest.mark.parametrize(
    ("stated", "total"), [(24, 24), (24.0, 24), (None, None), (True, None), ("24", None), (-1, None)]
)
def test_checkpoint_index_without_shards_gives_tensor_names_and_total_size(tmp_path, stated, total):
    content = {"metadata": {"total_size": stated}, "weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    assert read_folder(tmp_path) == Checkpoint(index=CheckpointIndex({"a": "model-1.safetensors"}, total))
