"""Traces whose columns have names and time units of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.cache.replay.columns import parse_columns, seconds
from tonnage.cache.replay.trace import Trace, TraceError, read_trace
from tonnage.planner.errors import DeploymentError

NAMED = "arrival=t,prompt_tokens=in,output_tokens=out"
SAME = [(0.0, 10, 5), (1.5, 20, 6), (4.0, 30, 7)]


def read(path: Path, text: str, columns: str | None = None) -> Trace:
    path.write_text(text)
    return read_trace(path, columns=None if columns is None else parse_columns(columns))


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    return [(round(r.arrival, 6), r.prompt_tokens, r.output_tokens) for r in trace.requests]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n100,10,5\n101.5,20,6\n104,30,7\n", None),
        ("arrival,prompt_tokens,output_tokens\n100,10,5\n101.5,20,6\n104,30,7\n", None),
        (
            "t,in,out,who\n100,10,5,a\n101.5,20,6,b\n104,30,7,c\n",
            NAMED,
        ),
        ("in,out,ms\n10,5,100\n20,6,1600\n30,7,4100\n", "arrival_ms=ms,prompt_tokens=in,output_tokens=out"),
        (
            '"t","in","out"\n2024-05-01T10:00:00Z,10,5\n2024-05-01T12:00:01.5+02:00,20,6\n'
            "2024-05-01 10:00:04,30,7\n",
            NAMED,
        ),
        (
            "\n".join(json.dumps({"t": 7 + t, "in": p, "out": o, "x": [1]}) for t, p, o in SAME),
            NAMED,
        ),
        (
            "\n".join(json.dumps({"ms": 1000 * t, "prompt_tokens": p, "output_tokens": o}) for t, p, o in SAME),
            "arrival_ms=ms",
        ),
    ],
    ids=[
        "azure in seconds",
        "the log's names",
        "csv",
        "milliseconds",
        "dates",
        "json",
        "json, the rest as the log",
    ],
)
def test_renamed_trace_columns_give_the_same_requests(text: str, columns: str | None, tmp_path: Path) -> None:
    assert rows(read(tmp_path / "t", text, columns)) == SAME


def test_extra_trace_columns_are_ignored(tmp_path: Path) -> None:
    text = "t,in,out,cap,who\n0,10,5,50,7\n1,20,6,,b\n"
    trace = read(tmp_path / "t", text, "arrival=t,prompt_tokens=in,output_tokens=out,max_tokens=cap,tenant=who")
    assert [(r.max_tokens, r.tenant) for r in trace.requests] == [(50, "7"), (None, "b")]
    line = {"a": 1, "i": 600, "o": 5, "ids": [4, 5]}
    (found,) = read(
        tmp_path / "j", json.dumps(line), "arrival=a,prompt_tokens=i,output_tokens=o,hash_ids=ids"
    ).requests
    assert found.hash_ids == (4, 5)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("arival=t", "did you mean arrival"), ("arrival", "NAME=COLUMN"), ("arrival=", "NAME=COLUMN"),
        ("arrival=t,arrival_ms=u", "both"), ("colour=t", "one of arrival"),
    ],
)  # fmt: skip
def test_invalid_trace_column_mappings_are_rejected(columns: str, says: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        parse_columns(columns)
    assert says in str(caught.value)
    assert caught.value.field == "--columns"


@pytest.mark.parametrize(
    ("text", "columns", "says"),
    [
        ("t,inn,out\n0,1,1\n", NAMED, "did you mean inn"),
        ("t,in,out\nsoon,1,1\n", NAMED, "line 2"),
        (
            "t,in,out\n0,1.5,1\n",
            NAMED,
            "line 2: prompt_tokens is '1.5'",
        ),
        ("t,in,out\n0,,1\n", NAMED, "line 2: in is missing"),
        ("t,in,out\nnan,1,1\n", NAMED, "line 2: the arrival time is nan"),
        ("t,in,out\n0,1,1\n", None, "--columns"),
        ('{"t": 0, "in": 1}\n', NAMED, "out is missing"),
    ],
)
def test_error_for_a_missing_trace_column_names_it(
    text: str, columns: str | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path / "t", text, columns)
    assert says in str(caught.value)


def test_trace_time_with_seven_fractional_digits_is_parsed() -> None:
    assert seconds("2023-11-16 18:15:46.6805900") - seconds("2023-11-16 18:15:46") == pytest.approx(0.68059)
    assert seconds("2023-11-16T18:15:46Z") == seconds("2023-11-16 18:15:46")
