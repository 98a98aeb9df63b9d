"""Tests of the readers of agentic sessions, RAGPulse, KV events and CSV files with hash ids."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import msgspec
import pytest

from tonnage.cache.errors import CacheError
from tonnage.cache.replay.columns import parse_columns
from tonnage.cache.replay.tiers import chunk_keys
from tonnage.cache.replay.trace import TraceError, read_trace

DATA = Path(__file__).parents[1] / "data"
SESSION = {
    "id": "trace_0001", "block_size": 64, "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "n", "in": 200, "out": 9, "hash_ids": [1, 2, 3]},
        {"t": 12.5, "type": "s", "in": 256, "out": 0, "hash_ids": [1, 2, 3, 4]},
    ],
}  # fmt: skip


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_folder_of_session_files_is_read_as_one_trace_with_hash_ids_per_session(tmp_path: Path) -> None:
    write(tmp_path / "a.json", SESSION)
    write(tmp_path / "b.json", SESSION | {"id": "trace_0002"})
    trace = read_trace(tmp_path)
    assert (trace.format, len(trace.requests)) == ("weka", 4)
    assert [request.arrival for request in trace.requests] == [0.0, 0.0, 12.5, 12.5]
    assert [request.output_tokens for request in trace.requests] == [9, 9, 1, 1]
    known: dict[tuple[int, int], int] = {}
    first, other, second, _ = (set(chunk_keys(request, known)) for request in trace.requests)
    assert first < second
    assert not first & other
    write(tmp_path / "a.json", SESSION | {"hash_id_scope": "global"})
    write(tmp_path / "b.json", SESSION | {"hash_id_scope": "global", "id": "trace_0002"})
    shared = read_trace(tmp_path)
    assert shared.requests[0].hash_ids[:3] == shared.requests[1].hash_ids[:3]


REFUSED_SESSIONS = [
    ({"block_size": None}, "block_size is None"),
    ({"hash_id_scope": "tenant"}, "hash_id_scope is 'tenant'"),
    ({"requests": [{"t": 0, "in": 200, "out": 1, "hash_ids": [1]}]}, "request 0: 1 hash_ids for 3 full blocks"),
    ({"requests": [{"t": 0, "out": 1, "hash_ids": [1]}]}, "request 0: in is missing"),
    ({"requests": [{"t": 0, "in": 200, "out": 1}]}, "request 0: hash_ids is missing"),
    ({"requests": []}, "has no request"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED_SESSIONS)
def test_session_file_with_an_invalid_field_is_rejected_naming_the_field(
    tmp_path: Path, change, words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        read_trace(write(tmp_path / "s.json", SESSION | change))


def test_json_file_that_is_no_session_trace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not an agentic session"):
        read_trace(write(tmp_path / "s.json", {"requests": []}))
    (tmp_path / "cut.json").write_text("{")
    with pytest.raises(TraceError, match="invalid JSON"):
        read_trace(tmp_path / "cut.json")


RAG = {"timestamp": "82", "input_length": 100, "output_length": 5, "session_id": "a",
       "hash_ids": {"sys_prompt": [1, 2], "passages_ids": [7], "history": [3], "web_search": [],
                    "user_input": [9]}}  # fmt: skip


def rag(tmp_path: Path, *records: object) -> Path:
    lengths = {1: 20, 2: 20, 3: 4, 7: 30, 8: 30, 9: 10, 10: 10}
    write(
        tmp_path / "1_sys_prompt.jsonl", *({"sys_prompt_id": i, "token_length": n} for i, n in lengths.items())
    )
    return write(tmp_path / "0_trace.jsonl", *records)


def test_ragpulse_prompts_share_the_blocks_before_their_first_differing_part(tmp_path: Path) -> None:
    other = RAG | {"hash_ids": RAG["hash_ids"] | {"passages_ids": [8]}, "timestamp": "93"}
    again = RAG | {"hash_ids": RAG["hash_ids"] | {"user_input": [10]}, "timestamp": "99"}
    trace = read_trace(rag(tmp_path, RAG, other, again))
    assert trace.format == "ragpulse"
    first, second, third = (request.hash_ids for request in trace.requests)
    assert len(first) == 7  # 100 tokens in blocks of 16
    # the system prompt has 40 tokens, two full blocks; with passages and history 74, four full blocks
    assert [one == two for one, two in zip(first, second, strict=True)] == [True] * 2 + [False] * 5
    assert [one == two for one, two in zip(first, third, strict=True)] == [True] * 4 + [False] * 3


def test_ragpulse_trace_without_component_lengths_is_rejected_naming_the_component(tmp_path: Path) -> None:
    alone = write(tmp_path / "0_trace.jsonl", RAG)
    with pytest.raises(TraceError, match="no file beside it has the lengths"):
        read_trace(alone)
    missing = RAG | {"hash_ids": RAG["hash_ids"] | {"user_input": [77]}}
    with pytest.raises(TraceError, match="line 1: the length of user_input 77"):
        read_trace(rag(tmp_path, missing))
    with pytest.raises(TraceError, match="unknown key 'tools'"):
        read_trace(rag(tmp_path, RAG | {"hash_ids": RAG["hash_ids"] | {"tools": [1]}}))


def stored(hashes: list[object], parent: object, **more: object) -> dict[str, object]:
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": [],
            "block_size": 16, "medium": "GPU", **more}  # fmt: skip


def test_recorded_kv_events_are_read_as_requests_that_share_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "events.jsonl",
        [100.0, [stored(["a", "b", "c"], None)], 0],
        [100.1, [stored(["d"], "c"), stored(["x", "y"], "b")], 0],  # an output block, and a second request
        {"ts": 101.0, "events": [{"type": "BlockRemoved", "block_hashes": ["y"], "medium": "GPU"}]},
        [102.0, [stored(["z"], None, medium="CPU"), stored(["q"], None, group_idx=1)], 0],
        [103.0, [stored(["e", "f"], "d")], 0],  # the conversation continues behind the output
    )
    trace = read_trace(path)
    assert trace.format == "kv-events"
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 48, 16), (pytest.approx(0.1), 64, 1), (3.0, 96, 1),
    ]  # fmt: skip
    first, second, third = (request.hash_ids for request in trace.requests)
    assert first[:2] == second[:2]
    assert first == third[:3]


REFUSED_EVENTS = [
    ([1.0, [{"type": "BlockLost"}], 0], "line 1: the event type 'BlockLost' is unknown"),
    ([1.0, [{"block_hashes": [1]}], 0], "line 1: type is missing"),
    (
        [1.0, [{"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}], 0],
        "block_size is missing",
    ),
    ([1.0, [stored([], None)], 0], "block_hashes is not a list with a hash"),
    ([1.0, [["BlockStored", [1], None]], 0], "not a JSON object with a type"),
    ([10**400, [stored([1], None)], 0], "line 1: ts is 1000.*, too large for a number"),
    ([1.0, [stored([1], {})], 0], "parent_block_hash has a value that is no hash"),
    ([math.inf, [stored([1], None)], 0], "an arrival time is inf"),
    ([1.0, [stored([1, 1], None)], 0], "parent_block_hash: the block 1 comes before itself"),
    ([1.0, [stored([1], 2), stored([2], 1)], 0], "comes before itself"),
]


@pytest.mark.parametrize(("batch", "words"), REFUSED_EVENTS)
def test_kv_event_with_missing_fields_is_rejected_naming_the_field(
    tmp_path: Path, batch: object, words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        read_trace(write(tmp_path / "events.jsonl", batch))


def in_msgpack(path: Path, *batches: object) -> Path:
    """Write batches as a subscriber of vLLM's publisher stores their payloads."""
    path.write_bytes(b"".join(map(msgspec.msgpack.encode, batches)))
    return path


def test_kv_events_in_msgpack_give_the_same_requests_as_in_json(tmp_path: Path) -> None:
    batches = [[100.0, [stored(["a", "b", "c"], None)], 0], [100.1, [stored(["d"], "c")], 0], [101.5, []]]
    found = read_trace(in_msgpack(tmp_path / "events.msgpack", *batches))
    assert found.format == "kv-events"
    assert found.requests == read_trace(write(tmp_path / "events.jsonl", *batches)).requests


def test_kv_events_recorded_from_vllm_give_the_prompts_that_were_sent() -> None:
    """Six sessions of three turns with 400, 500 and 600 tokens, on a pool that holds three and a host tier.

    Later turns load blocks from the tier, so that vLLM reports their blocks a second time. Its blocks have 32
    tokens; the rest of a prompt leaves no event. The last prompt repeats the first one.
    """
    trace = read_trace(DATA / "traces" / "kv_events_vllm_0.32.msgpack")
    assert [request.prompt_tokens for request in trace.requests] == [384] * 6 + [480] * 6 + [576] * 6 + [384]
    chains = [request.hash_ids or () for request in trace.requests]
    for session in range(6):
        first, second, third = chains[session], chains[6 + session], chains[12 + session]
        assert first == second[:12] == third[:12]  # 400 tokens begin all turns
        assert not set(second[12:]) & set(first)
    assert len(set().union(*chains[:6])) == 6 * 12
    assert chains[18] == chains[0]


REFUSED_BYTES = [
    (msgspec.msgpack.encode([1.0, [stored([1], None)], 0])[:-9], "the value at byte 0 is cut off"),
    (
        msgspec.msgpack.encode([1.0, [stored([1], None)], 0]) * 2 + b"\xc1",
        "the value at byte .* is not valid msgpack: FormatError",
    ),
    (b"\x93\xcb" + bytes(8) + b"\x91\xc7\x01\x05\x00\xc0", "an event is not a JSON object"),
    (b"\x92\x00" + b"\x91" * 40 + b"\x00", "an event is not a JSON object"),
    (b"\x92\x00" + b"\x91" * 4000 + b"\x00", "StackError"),
    (b"\x92\x00\x91\x81\x01\x02", "int is not allowed for map key"),
    (b"\x92\x00\xdd\xff\xff\xff\xff", "4294967295 exceeds max_array_len"),
    (
        msgspec.msgpack.encode([1.0, [{"type": "BlockLost"}], 0]),
        "byte 0: the event type 'BlockLost' is unknown",
    ),
    (b"\x92\x00", "cut off"),
]


@pytest.mark.parametrize(("data", "words"), REFUSED_BYTES)
def test_damaged_msgpack_trace_is_rejected_with_the_reason(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "events.msgpack").write_bytes(data)
    with pytest.raises(TraceError, match=words):
        read_trace(tmp_path / "events.msgpack")


def test_msgpack_trace_without_the_package_msgpack_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(CacheError, match="needs the package msgpack") as caught:
        read_trace(in_msgpack(tmp_path / "events.msgpack", [1.0, [stored([1], None)], 0]))
    assert "tonnage[replay]" in str(caught.value.hint)


def test_kv_events_published_by_tonnage_are_read_as_a_trace(tmp_path: Path) -> None:
    msgspec = pytest.importorskip("msgspec")
    pytest.importorskip("zmq")
    from tonnage.cache.prefix.events import BlockStored
    from tonnage.server.engines.kv_events import encode

    event = BlockStored(block_hashes=(5, 6), parent_block_hash=None, token_ids=tuple(range(32)), block_size=16)
    batch = msgspec.msgpack.decode(encode([event], 7.0, 0))
    (tmp_path / "events.jsonl").write_bytes(msgspec.json.encode(batch))
    (request,) = read_trace(tmp_path / "events.jsonl").requests
    assert (request.prompt_tokens, len(request.hash_ids)) == (32, 2)


def test_csv_trace_with_a_column_mapping_reads_a_list_of_hash_ids_from_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text('t,in,out,ids,size\n0,128,4,"[1, 2]",64\n3,128,4,"[1, 5]",64\n')
    names = parse_columns("arrival=t,prompt_tokens=in,output_tokens=out,hash_ids=ids,hash_block=size")
    first, second = read_trace(path, columns=names).requests
    assert (first.hash_ids, second.hash_ids, first.hash_block) == ((1, 2), (1, 5), 64)
    path.write_text("t,in,out,ids,size\n0,128,4,one,64\n")
    with pytest.raises(TraceError, match="line 2: hash_ids is not a list"):
        read_trace(path, columns=names)
