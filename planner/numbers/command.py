"""The command `tonnage dtype`: a table of all number formats, or one value converted to each format."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from tonnage.planner.arguments import Parser, refused
from tonnage.planner.errors import DeploymentError, TonnageError, did_you_mean
from tonnage.planner.model.dtypes import SPELLINGS
from tonnage.planner.numbers.draw import drawn
from tonnage.planner.numbers.formats import (
    BLOCKS,
    FLOATS,
    INTEGERS,
    FloatFormat,
    Real,
    is_finite,
    nearest_nf4,
    relative_error,
    size_of,
)
from tonnage.planner.screen import aligned

_EPILOG = """
A value is (-1)^sign x 2^(exponent - bias) x (1 + mantissa / 2^bits), with an exponent field of 0 (subnormal)
(-1)^sign x 2^(1 - bias) x mantissa / 2^bits. The error is |stored - value| / |value|.

examples:
  tonnage dtype                      the table of formats
  tonnage dtype 3.14159              the value's bits and error in each
  tonnage dtype 0.1 --format bf16    its bits drawn, with the formula
  tonnage dtype 70000 --format fp16  what overflow does
  tonnage dtype --format bf16 --bits 1,17,3   sign, exponent and mantissa fields -> value
"""
# Maximum number of decimal digits before or after the point. Numbers with more digits are beyond the range of
# every format, so they round in the same way as a number with this many digits.
_MOST_DIGITS = 2000
_WIDTH = 80  # maximum width of printed lines in characters
NAMES = tuple(f.name for f in FLOATS) + tuple(b.name for b in BLOCKS) + tuple(i[0] for i in INTEGERS)
_SPELLED = {
    "e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "e5m2": "fp8_e5m2", "float8_e5m2": "fp8_e5m2",
    "e2m1": "fp4_e2m1", "fp4": "fp4_e2m1",
}  # fmt: skip


def parser() -> Parser:
    """Return the parser of `tonnage dtype`."""
    p = Parser(
        "tonnage dtype", "Show the number formats, or sign, exponent and mantissa of a value in each.", _EPILOG
    )
    p.add_argument("value", metavar="VALUE", nargs="?", help="a decimal number, inf or nan")
    p.add_argument("--format", metavar="NAME", help="one format only: " + ", ".join(NAMES))
    p.add_argument("--bits", metavar="S,E,M", help="fields as integers -> the value they stand for")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def table() -> list[dict[str, Any]]:
    """Return one table row per number format: exponent and mantissa bits, range, and bytes of a value."""
    rows: list[dict[str, Any]] = []
    for f in FLOATS:
        rows.append({
            "format": f.name, "sign": 1, "exponent": f.exponent, "mantissa": f.mantissa, "bias": f.bias,
            "bytes": f.stored_bits / 8, "largest": f.largest, "smallest_normal": f.smallest_normal,
            "smallest": f.smallest, "epsilon": 2.0**-f.mantissa, "note": f.scale,
        })  # fmt: skip
    for name, low, high, bits in INTEGERS:
        rows.append(
            {"format": name, "bytes": bits / 8, "largest": high, "smallest": low, "note": "with a scale"}
        )
    for b in BLOCKS:
        rows.append({"format": b.name, "bytes": b.bits_per_value / 8, "note": b.what})
    return rows


def read_value(text: str) -> Real:
    """Parse the text of a number; return an exact fraction, or a float for infinity, NaN and zero.

    Raises:
        DeploymentError: the text is not a number, or is too long.
    """
    word = text.strip().lower()
    meant = [name for name in (*NAMES, *_SPELLED) if word in (name, name.partition("_")[0])]
    wrong = DeploymentError(
        f"{text.strip()[:40]!r} is not a number", field="VALUE",
        hint=f"to choose a format, use --format {' or '.join(meant)}" if meant else None,
    )  # fmt: skip
    try:
        number = Decimal(text.strip())
    except InvalidOperation:  # Decimal also raises InvalidOperation for an exponent of more than 18 digits.
        rough = _float(text, wrong)
        number = Decimal((math.copysign(1, rough) < 0, (1,), _MOST_DIGITS if rough else -_MOST_DIGITS))
    if not number.is_finite() or number == 0:
        return _float(text, wrong)
    if len(text) > _MOST_DIGITS:
        raise DeploymentError(f"the number has more than {_MOST_DIGITS:,} characters", field="VALUE")
    size = number.adjusted()
    if abs(size) > _MOST_DIGITS:
        number = Decimal((number.is_signed(), (1,), _MOST_DIGITS if size > 0 else -_MOST_DIGITS))
    return Fraction(number)


def _float(text: str, wrong: DeploymentError) -> float:
    try:
        return float(text)
    except ValueError:
        raise wrong from None


def value_rows(value: Real) -> list[dict[str, Any]]:
    """Return one table row per number format: how it stores `value`, with bits, relative error and rounding."""
    rows = [_row(f, value) for f in FLOATS]
    for name, low, high, _ in INTEGERS:
        if is_finite(value):
            stored = max(low, min(high, round(value)))
            what = "saturates" if not low <= round(value) <= high else _rounding(value, stored)
            error = relative_error(value, stored)
            rows.append({"format": name, "value": stored, "relative_error": error, "what": f"{what} (scale 1)"})
    if is_finite(value) and size_of(value) <= 1:
        index, level = nearest_nf4(value)
        error = relative_error(value, level)
        rows.append(
            {"format": "nf4", "value": level, "bits": f"{index:04b}", "relative_error": error,
             "what": "level next to it, absmax 1"}
        )  # fmt: skip
    return rows


def _row(f: FloatFormat, value: Real) -> dict[str, Any]:
    sign, exponent, mantissa = f.encode(value)
    stored = f.decode(sign, exponent, mantissa)
    if not is_finite(value) and math.isnan(value):
        what = "NaN" if math.isnan(stored) else "no NaN in this format: the largest value"
    elif math.isinf(stored) and is_finite(value):
        what = "overflows to infinity"
    elif size_of(value) > f.largest and f.overflow == "saturate":
        what = "saturates"
    elif value != 0 and stored == 0:
        what = "underflows to zero"
    elif exponent == 0 and stored != 0:
        what = _rounding(value, stored) + ", subnormal"
    else:
        what = _rounding(value, stored)
    return {
        "format": f.name, "sign": sign, "exponent": exponent, "mantissa": mantissa, "bias": f.bias,
        "bits": f.pattern(sign, exponent, mantissa), "formula": f.formula(sign, exponent, mantissa),
        "value": stored, "relative_error": relative_error(value, stored), "what": what,
    }  # fmt: skip


def _rounding(value: Real, stored: float) -> str:
    return "exact" if stored == value else "rounded " + ("up" if stored > value else "down")


def _fields(f: FloatFormat, text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(p.strip().isdecimal() for p in parts):
        raise DeploymentError(
            f"{text[:40]!r} is not three integers sign,exponent,mantissa", field="--bits",
            hint="for example 1,17,3",
        )  # fmt: skip
    sign, exponent, mantissa = map(int, parts)
    for name, field, bits in (
        ("sign", sign, 1),
        ("exponent", exponent, f.exponent),
        ("mantissa", mantissa, f.mantissa),
    ):
        if field >= 1 << bits:
            raise DeploymentError(
                f"{name} {field} is too large: {f.name} has {bits} bits for it, at most {(1 << bits) - 1}",
                field="--bits",
            )
    return sign, exponent, mantissa


def run(argv: list[str]) -> int:
    """Run `tonnage dtype` and return its exit code: 0, or 2 for bad input."""
    try:
        args = parser().parse_args([_as_value(word) for word in argv])
        return _run(args)
    except SystemExit as stop:  # argparse has printed --help
        return int(stop.code or 0)
    except TonnageError as error:
        return refused(error)


def _as_value(word: str) -> str:
    """Return a word of the command line; a negative number gets a leading space for argparse.

    argparse of Python 3.11 parses -7.9e-34 and -inf as options, but never a word that contains a space.
    """
    try:
        float(word)
    except ValueError:
        return word
    return f" {word}" if word.startswith("-") else word


def _format(name: str | None) -> str | None:
    """Return the number format (a name in NAMES) that --format selects, or None without --format.

    Raises:
        DeploymentError: no format has that name.
    """
    if name is None:
        return None
    word = name.lower().replace("-", "_")
    same = next((names for names in SPELLINGS if word in names), frozenset((word, _SPELLED.get(word, word))))
    found = next((known for known in NAMES if known.replace("-", "_") in same), None)
    if found is None:
        close = did_you_mean(name, NAMES)
        hint = (f"{close} " if close else "") + ", ".join(NAMES)
        raise DeploymentError(f"{name[:40]!r} is not known", field="--format", hint=hint)
    return found


def _run(args: argparse.Namespace) -> int:
    name = _format(args.format)
    chosen = next((f for f in FLOATS if f.name == name), None)
    if args.bits is not None:
        if args.value is not None:
            raise DeploymentError(
                "cannot be used together with VALUE", field="--bits", hint="leave out --bits or VALUE"
            )
        if chosen is None:
            raise DeploymentError("needs --format " + "|".join(f.name for f in FLOATS), field="--bits")
        fields = _fields(chosen, args.bits)
        value = chosen.decode(*fields)
        print(json.dumps({"value": value, "formula": chosen.formula(*fields)}) if args.json else repr(value))
        return 0
    given = None if args.value is None else read_value(args.value)
    rows = table() if given is None else value_rows(given)
    if name is not None:
        rows = [row for row in rows if row["format"] == name]
    if not rows:
        raise _of_a_block(name)
    if args.json:
        print(json.dumps({"rows": [{k: _finite(v) for k, v in row.items()} for row in rows]}, indent=2))
        return 0
    for line in _lines(rows, given is None):
        print(line)
    if chosen is not None and given is not None:
        print("\n".join(["", *drawn(chosen, given, args.value.strip())]))
    return 0


def _of_a_block(name: str | None) -> DeploymentError:
    """Return the error for a value that the number format `name` cannot store.

    A block format stores no value by itself, and an integer format has neither infinity nor NaN.
    """
    block = next((b for b in BLOCKS if b.name == name), None)
    if block is None:  # `name` is an integer format, and the value is infinity or NaN
        return DeploymentError(f"{name} has neither infinity nor NaN", field="VALUE")
    hint = (
        "--format fp4_e2m1 shows an element"
        if "E2M1" in block.what
        else "--format nf4 and a value from -1 to 1"
    )
    return DeploymentError(f"{name} stores no value by itself: {block.what}", field="--format", hint=hint)


def _finite(value: Any) -> Any:
    """Return a float that JSON cannot represent (infinity, NaN) as text, and any other value unchanged."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _lines(rows: list[dict[str, Any]], formats: bool) -> list[str]:
    """Return table rows of number formats as lines of at most 80 characters.

    A note that does not fit on its row's line gets a separate line.
    """
    if formats:
        table = [["format", "s/e/m", "bias", "bytes", "largest", "smallest", "epsilon"]]
        for r in rows:
            fields = f"1/{r['exponent']}/{r['mantissa']}" if "exponent" in r else ""
            number = [f"{r[k]:.6g}" if k in r else "" for k in ("largest", "smallest", "epsilon")]
            table.append([r["format"], fields, str(r.get("bias", "")), f"{r['bytes']:.4g}", *number])
        return _with_notes(table, ["note", *(r["note"] for r in rows)], range(1, 7))
    table = [["format", "sign exponent mantissa", "value", "error"]]
    for r in rows:
        error = f"{r['relative_error']:.2e}" if r.get("relative_error") else ""
        table.append([r["format"], r.get("bits", ""), repr(r["value"]), error])
    notes = (r["what"].removeprefix("rounded ").replace(" (scale 1)", ", scale 1") for r in rows)
    return _with_notes(table, ["rounded", *notes], (3,))


def _with_notes(table: list[list[str]], notes: list[str], right: Collection[int]) -> list[str]:
    """Return the lines of a text table, each followed by its note, on the same line if the note fits."""
    lines = aligned([[*row, ""] for row in table], right)
    width = max(map(len, lines))
    out = []
    for line, note in zip(lines, notes, strict=True):
        if width + 1 + len(note) <= _WIDTH:
            out.append(f"{line:<{width}} {note}".rstrip())
        else:
            out += [line, f"    {note}"]
    return out
