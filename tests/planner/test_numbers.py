"""Tests of number formats bit by bit, against torch's own casts."""

from __future__ import annotations

import json
import math
import random

import pytest

from tonnage.planner.numbers.command import read_value, run
from tonnage.planner.numbers.formats import BLOCKS, FLOATS, NF4_LEVELS, FloatFormat, nearest_nf4


def float_format(name: str) -> FloatFormat:
    """Return the floating-point format called `name`."""
    return next(each for each in FLOATS if each.name == name)


def test_sign_exponent_and_mantissa_of_bf16_decode_to_the_known_value():
    """The fields are sign 1, exponent 17, mantissa 3; an article prints mantissa 5's value for them."""
    bf16 = float_format("bf16")
    assert bf16.decode(1, 17, 3) == -7.884275709835247e-34
    assert bf16.decode(1, 17, 5) == -8.004646331359449e-34
    assert bf16.encode(-7.884275709835247e-34) == (1, 17, 3)


@pytest.mark.parametrize(
    ("name", "fields", "stored"),
    [("fp32", (8, 23), 32), ("tf32", (8, 10), 32), ("fp16", (5, 10), 16), ("bf16", (8, 7), 16),
     ("fp8_e4m3", (4, 3), 8), ("fp8_e5m2", (5, 2), 8), ("fp4_e2m1", (2, 1), 4)],
)  # fmt: skip
def test_number_format_has_the_expected_field_widths_and_stored_bits(name, fields, stored):
    found = float_format(name)
    assert ((found.exponent, found.mantissa), found.stored_bits) == (fields, stored)


def test_number_format_has_the_expected_largest_and_smallest_values():
    limits = {f.name: f.largest for f in FLOATS}
    assert limits["fp16"] == 65504
    assert limits["fp8_e4m3"] == 448
    assert limits["fp8_e5m2"] == 57344
    assert limits["fp4_e2m1"] == 6
    assert limits["fp32"] == pytest.approx(3.4028234663852886e38, rel=0)
    assert float_format("fp16").smallest == 2.0**-24


def test_block_format_has_the_expected_bits_per_value():
    bits = {b.name: b.bits_per_value for b in BLOCKS}
    assert bits["mxfp4"] == 4 + 8 / 32
    assert bits["nvfp4"] == 4 + 8 / 16
    assert bits["nf4"] == 4 + 32 / 64


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn",
          "fp8_e5m2": "float8_e5m2"}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_to_a_number_format_equals_torchs_cast(name):
    """Random values of every size, all ties and both limits have the fields and value of torch's cast."""
    torch = pytest.importorskip("torch", reason="its casts are the oracle")
    found, dtype = float_format(name), getattr(torch, DTYPES[name])
    rng = random.Random(5)
    values = [rng.uniform(-2, 2) * 2.0 ** rng.randint(-40, 20) for _ in range(3000)]
    values += [
        0.0,
        -0.0,
        1.0,
        found.largest,
        -found.largest,
        found.smallest,
        found.smallest / 2,
        found.smallest * 1.5,
    ]
    for exponent in range(1, min(found.top, 40)):
        low = found.decode(0, exponent, 0)
        step = math.ldexp(1.0, exponent - found.bias - found.mantissa)
        values += [low + step / 2, low + 1.5 * step]  # ties
    single = torch.tensor(values, dtype=torch.float64).to(torch.float32)  # torch rounds from fp32
    for value, expected in zip(single.tolist(), single.to(dtype).to(torch.float64).tolist(), strict=True):
        got = found.decode(*found.encode(value))
        assert got == expected or (math.isnan(got) and math.isnan(expected)), (name, value)
        assert math.copysign(1, got) == math.copysign(1, expected) or math.isnan(expected)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp16", "bf16"])
def test_every_bit_pattern_of_a_number_format_decodes_as_in_torch(name):
    torch = pytest.importorskip("torch", reason="its casts are the oracle")
    found, dtype = float_format(name), getattr(torch, DTYPES[name])
    raw = (
        torch.arange(256, dtype=torch.uint8)
        if found.bits == 8
        else torch.arange(65536, dtype=torch.int32).to(torch.int16)
    )
    expected = raw.view(dtype).to(torch.float64).tolist()
    for pattern, value in enumerate(expected):
        sign = pattern >> (found.bits - 1)
        exponent = pattern >> found.mantissa & ((1 << found.exponent) - 1)
        got = found.decode(sign, exponent, pattern & ((1 << found.mantissa) - 1))
        assert got == value or (math.isnan(got) and math.isnan(value)), pattern


def test_nf4_levels_equal_bitsandbytes():
    torch = pytest.importorskip("torch", reason="the code book is a tensor")
    functional = pytest.importorskip("bitsandbytes.functional", reason="its code book is the oracle")
    book = functional.get_4bit_type("nf4", device="cpu")
    assert torch.tensor(NF4_LEVELS).tolist() == book.tolist()
    assert nearest_nf4(0.1) == (8, NF4_LEVELS[8])


def test_value_overflows_saturates_or_underflows_according_to_the_format(capsys):
    assert run(["70000", "--json"]) == 0
    rows = {r["format"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert (rows["fp16"]["value"], rows["fp16"]["what"]) == ("inf", "overflows to infinity")
    assert rows["bf16"]["value"] == 70144.0
    assert (rows["fp8_e4m3"]["value"], rows["fp8_e4m3"]["what"]) == (448.0, "saturates")
    assert rows["fp4_e2m1"]["value"] == 6.0
    assert run(["1e-9", "--json"]) == 0
    rows = {r["format"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["fp16"]["what"] == "underflows to zero"
    assert rows["bf16"]["value"] == pytest.approx(1e-9, rel=2**-8)


def test_dtype_command_prints_a_table_and_the_fields_of_a_format(capsys):
    assert run([]) == 0
    out = capsys.readouterr().out
    assert "1/8/7" in out
    assert "\x1b" not in out
    assert run(["--format", "bf16", "--bits", "1,17,3"]) == 0
    assert capsys.readouterr().out.strip() == "-7.884275709835247e-34"
    for value in ("inf", "nan", "-3", "0", "-inf"):
        assert run([value]) == 0
    capsys.readouterr()
    assert run(["-7.884275709835247e-34", "--format", "bf16"]) == 0
    assert "1 00010001 0000011 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pi"], ["VALUE", "'pi'"]),
        (["fp8"], ["VALUE", "'fp8'", "--format fp8_e4m3 or fp8_e5m2"]),
        (["1", "--format", "fp12"], ["--format", "'fp12'"]),
        (["--format", "bf16", "--bits", "1,300,0"], ["--bits", "300", "8 bits"]),
        (["--format", "bf16", "--bits", "1,2"], ["--bits", "1,17,3"]),
        (["--bits", "1,2,3"], ["--bits", "--format"]),
    ],
)
def test_dtype_command_reports_bad_input_in_one_line(capsys, arguments, words):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1e999999999", f"1e{10**24}"])
def test_number_above_the_range_of_double_overflows(text, capsys):
    """Python's float of 1e400 is inf, which would appear to be exact."""
    assert run([text, "--json"]) == 0
    rows = {r["format"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    sign = "-" if text.startswith("-") else ""
    for name in ("fp32", "tf32", "fp16", "bf16", "fp8_e5m2"):
        assert (rows[name]["what"], rows[name]["value"]) == ("overflows to infinity", f"{sign}inf")
    assert (rows["fp8_e4m3"]["what"], rows["fp8_e4m3"]["relative_error"]) == ("saturates", 1.0)
    assert run([text, "--format", "fp32"]) == 0
    out = capsys.readouterr().out
    assert f"Overflow: the largest value is 3.4028234663852886e+38, and {text} becomes infinity." in out
    assert "exact" not in out


def test_number_below_the_range_of_double_underflows(capsys):
    assert run(["1e-400", "--json"]) == 0
    rows = {r["format"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert {rows[f.name]["what"] for f in FLOATS} == {"underflows to zero"}
    assert run(["1e-400", "--format", "bf16"]) == 0
    assert "Underflow: the smallest value is" in capsys.readouterr().out


def test_decimal_number_is_rounded_to_the_number_format_without_first_rounding_to_double(capsys):
    """A double rounds a decimal slightly above 2^24 to 2^24."""
    assert run(["16777216.000000000000001", "--json"]) == 0
    rows = {r["format"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["fp32"]["what"] == "rounded down"
    assert 0 < rows["fp32"]["relative_error"] < 1e-21
    assert float_format("fp32").encode(read_value("16777217.0000000000000001")) == (0, 151, 1)  # above the tie


def test_dtype_command_draws_the_bits_and_prints_the_formula(capsys):
    assert run(["3.14159", "--format", "BF16"]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "bf16: 1 bit of sign, 8 of exponent (bias 2^7 - 1 = 127), 7 of mantissa",
        "  0 10000000 1001001",
        "  | |        +- mantissa 73: 1 + 73/2^7 = 1.5703125",
        "  | +- exponent 128: 2^(128 - 127) = 2^1",
        "  +- sign 0: +",
        "  (-1)^0 x 2^(128 - 127) x (1 + 73/2^7) = 3.140625",
        "  relative error |3.140625 - 3.14159| / |3.14159| = 3.07e-04, at most 2^-8 = 3.91e-03",
    ]
    assert run(["1e-7", "--format", "float16"]) == 0
    out = capsys.readouterr().out
    assert "exponent 0, subnormal: 2^(1 - 15) = 2^-14" in out
    assert "(-1)^0 x 2^(1 - 15) x (0 + 2/2^10) = 1.1920928955078125e-07" in out
    for value in ("inf", "nan", "0", "-0.0"):
        assert run([value, "--format", "e4m3"]) == 0
    capsys.readouterr()
    assert run(["3.14159"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["format", "sign", "exponent", "mantissa", "value", "error", "rounded"]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("name", [f.name for f in FLOATS])
def test_formula_printed_for_a_number_evaluates_to_its_decoded_value(name):
    found, rng = float_format(name), random.Random(3)
    for _ in range(200):
        fields = found.encode(rng.uniform(-2, 2) * 2.0 ** rng.randint(-20, 8))
        formula = found.formula(*fields).replace("^", "**").replace(" x ", " * ")
        assert eval(formula) == found.decode(*fields)


def test_table_of_number_formats_shows_the_exponent_biases(capsys):
    assert run(["--json"]) == 0
    rows = {r["format"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert [rows[name]["bias"] for name in ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")] == [
        127, 15, 127, 7, 15, 1,
    ]  # fmt: skip
    assert run([]) == 0
    assert "bias" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["3.3", "--format", "NF4"], ["nf4 stores no value by itself", "absmax per 64"]),
        (["3.3", "--format", "mxfp4"], ["one E8M0 scale", "--format fp4_e2m1"]),
        (["inf", "--format", "int8"], ["int8 has neither infinity nor NaN"]),
        (["--", "-1.5", "--format", "fp16"], ["--format: must come before the --"]),
    ],
)
def test_block_format_rejects_single_value_with_reason(capsys, arguments, words):
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(word in shown.err for word in words), shown.err


def test_value_above_the_range_of_int8_has_a_relative_error(capsys):
    assert run(["300", "--format", "int8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["relative_error"] == pytest.approx(173 / 300)
