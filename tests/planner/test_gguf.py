"""Tests of the GGUF header reader against the gguf package, and with damaged files."""

from __future__ import annotations

import contextlib
import struct

import gguf
import numpy as np
import pytest
from demo_file import demo_gguf
from gguf.constants import GGML_QUANT_SIZES
from gguf_files import llama_file

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import CheckpointError, TonnageError, UnsupportedArchitecture
from tonnage.planner.headers.ggml_types import GGML_TYPES
from tonnage.planner.headers.gguf import GGUFArray, read_gguf
from tonnage.planner.planning.build import make_plan


def test_ggml_type_table_equals_gguf_package():
    assert {int(k): (k.name, *v) for k, v in GGML_QUANT_SIZES.items()} == GGML_TYPES


def test_header_of_the_demo_gguf_file_equals_the_gguf_packages_reader():
    path = demo_gguf()
    header = read_gguf(path)
    theirs = gguf.GGUFReader(path)
    assert [(t.name, t.dtype, t.nbytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, int(t.n_bytes)) for t in theirs.tensors
    ]
    found = [header.data_start + offset for offset in header.offsets]
    assert found == [t.data_offset for t in theirs.tensors]
    assert header.metadata["llama.block_count"] == 30
    assert header.metadata["tokenizer.ggml.tokens"] == GGUFArray(49_152)
    plan = make_plan(str(path), Deployment(device_memory=1 << 34))
    assert plan.model.via == "gguf"
    assert plan.model.parameters == 134_515_008
    assert plan.rank.weights_bytes == 269_030_272
    assert plan.kv_cache.layout == make_plan("demo", Deployment(device_memory=1 << 34)).kv_cache.layout


def test_llama_cpp_plan_keeps_the_tensor_types_of_a_gguf_file():
    """llama-server reports size 96576768 (tests/data/metrics_pages/llama.cpp-0.3.36/models.json)."""
    plan = make_plan(str(demo_gguf()), Deployment(engine="llama.cpp"))
    assert plan.rank.weights_bytes == 96_576_768
    assert {(part.dtype, part.bytes) for part in plan.weight_formats} == {
        ("Q8_0", 30_081_024), ("Q4_1", 66_355_200), ("F32", 140_544)
    }  # fmt: skip
    assert sum(term.value for term in plan.terms if term.name.startswith("weights.")) == 96_576_768
    halved = make_plan(
        str(demo_gguf()),
        Deployment(engine="llama.cpp", device="cuda", device_memory=80 << 30, pipeline_parallel_size=2),
    )
    assert sum(rank.weights_bytes for rank in halved.ranks) >= 96_576_768
    assert halved.rank.weights_bytes < 0.7 * 96_576_768
    assert make_plan(str(demo_gguf()), Deployment(engine="hf")).rank.weights_bytes == 269_030_272  # dequantized


def test_gguf_file_gives_the_same_plan_as_the_equivalent_config(tmp_path, folder_with, tiny_llama):
    flags = Deployment(device_memory=1 << 34)
    plan = make_plan(str(llama_file(tmp_path / "m.gguf")), flags)
    same = make_plan(folder_with(tiny_llama | {"tie_word_embeddings": True}), flags)
    assert plan.model.parameters == same.model.parameters
    assert plan.ranks == same.ranks


def test_truncated_gguf_file_is_rejected(tmp_path):
    path = llama_file(tmp_path / "m.gguf")
    data = path.read_bytes()
    for length in [*range(400), *range(400, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)


def test_gguf_header_cut_inside_an_array_of_strings_is_reported_as_truncated(tmp_path):
    """The reader of the hub fetches more bytes of a header only after an error that says truncated."""
    path = tmp_path / "m.gguf"
    strings = struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 1000)  # key "a": an array of 1,000 strings
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + strings)
    with pytest.raises(CheckpointError, match="the header is truncated"):
        read_gguf(path)


def test_corrupted_gguf_raises_only_planner_errors(tmp_path):
    path = llama_file(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(1)
    for position in rng.integers(0, 60_000, 300):
        for value in (0xFF, 0x80, 0x00):
            changed = bytearray(data)
            changed[position % len(data)] = value
            path.write_bytes(changed)
            with contextlib.suppress(TonnageError):
                make_plan(str(path), Deployment(device_memory=1 << 34))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"arch": "mamba"}, UnsupportedArchitecture, "general.architecture: 'mamba'"),
        ({"drop": "blk.1.ffn_up.weight"}, CheckpointError, "layers.1.mlp.up_proj.weight is not in the file"),
        ({"extra": "blk.0.surprise.weight"}, CheckpointError, "surprise.weight, which a llama model lacks"),
        ({"expert_count": 8}, UnsupportedArchitecture, "llama.expert_count"),
        ({"embedding_length": 128}, CheckpointError, "by the metadata"),
        ({"attention.head_count_kv": 3}, TonnageError, "not a multiple"),
        ({"block_count": 4_000_000}, TonnageError, "num_hidden_layers: 4000000"),
    ],
)
def test_inconsistent_gguf_file_is_rejected(tmp_path, options, error, match):
    with pytest.raises(error, match=match):
        make_plan(str(llama_file(tmp_path / "m.gguf", **options)), Deployment(device_memory=1 << 34))
