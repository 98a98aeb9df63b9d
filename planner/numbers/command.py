"""``tonnage dtype``: the number formats, and one value in each of them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any, NoReturn

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.numbers.formats import BLOCKS, FLOATS, INTEGERS, FloatFormat, nearest_nf4

_EPILOG = """
examples:
  tonnage dtype                      the table of formats
  tonnage dtype 3.14159              the value's bits and rounding error in each
  tonnage dtype 70000 --format fp16  what overflow does
  tonnage dtype --format bf16 --bits 1,17,3   sign, exponent and mantissa fields -> value
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DeploymentError(message, hint="tonnage dtype --help lists the options")


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="tonnage dtype",
        description="Show the number formats, or sign, exponent and mantissa of a value in each.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
        allow_abbrev=False,
    )
    p.add_argument("value", metavar="VALUE", nargs="?", help="a decimal number, inf or nan")
    p.add_argument("--format", metavar="NAME", help="one format only")
    p.add_argument("--bits", metavar="S,E,M", help="fields as integers -> the value they stand for")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def table() -> list[dict[str, Any]]:
    """One row per format."""
    rows: list[dict[str, Any]] = []
    for f in FLOATS:
        rows.append({
            "format": f.name, "sign": 1, "exponent": f.exponent, "mantissa": f.mantissa,
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


def value_rows(value: float) -> list[dict[str, Any]]:
    """``value`` in each format: fields, bits, what it is rounded to, relative error, what happened."""
    rows = []
    for f in FLOATS:
        rows.append(_row(f, value))
    for name, low, high, _ in INTEGERS:
        if math.isfinite(value):
            stored = max(low, min(high, round(value)))
            what = "saturates" if not low <= round(value) <= high else _rounding(value, stored)
            rows.append({"format": name, "value": stored, "what": f"{what} (scale 1)"})
    if math.isfinite(value) and abs(value) <= 1:
        index, level = nearest_nf4(value)
        rows.append(
            {"format": "nf4", "value": level, "bits": f"{index:04b}", "what": "level next to it, absmax 1"}
        )
    return rows


def _row(f: FloatFormat, value: float) -> dict[str, Any]:
    sign, exponent, mantissa = f.encode(value)
    stored = f.decode(sign, exponent, mantissa)
    if math.isnan(value):
        what = "NaN" if math.isnan(stored) else "no NaN in this format: the largest value"
    elif math.isinf(stored) and not math.isinf(value):
        what = "overflows to infinity"
    elif abs(value) > f.largest and not math.isinf(stored):
        what = "saturates"
    elif value != 0 and stored == 0:
        what = "underflows to zero"
    elif exponent == 0 and stored != 0:
        what = _rounding(value, stored) + ", subnormal"
    else:
        what = _rounding(value, stored)
    error = (
        abs(stored - value) / abs(value) if math.isfinite(stored) and math.isfinite(value) and value else None
    )
    return {
        "format": f.name, "sign": sign, "exponent": exponent, "mantissa": mantissa,
        "bits": f.pattern(sign, exponent, mantissa), "value": stored, "relative_error": error, "what": what,
    }  # fmt: skip


def _rounding(value: float, stored: float) -> str:
    return "exact" if stored == value else "rounded " + ("up" if stored > value else "down")


def _fields(f: FloatFormat, text: str) -> float:
    parts = text.split(",")
    if len(parts) != 3 or not all(p.strip().isdecimal() for p in parts):
        raise DeploymentError(f"{text[:40]!r} is not sign,exponent,mantissa", field="--bits", hint="1,17,3")
    sign, exponent, mantissa = map(int, parts)
    for name, field, bits in (
        ("sign", sign, 1),
        ("exponent", exponent, f.exponent),
        ("mantissa", mantissa, f.mantissa),
    ):
        if field >= 1 << bits:
            raise DeploymentError(f"{name} {field} does not fit {bits} bits of {f.name}", field="--bits")
    return f.decode(sign, exponent, mantissa)


def run(argv: list[str]) -> int:
    """Run ``tonnage dtype``. Exit code 0, or 2 for bad input."""
    try:
        args = parser().parse_args([_as_value(word) for word in argv])
        return _run(args)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except TonnageError as error:
        print(f"tonnage dtype: {error}", file=sys.stderr)
        return 2


def _as_value(word: str) -> str:
    """argparse (3.11) takes -7.9e-34 and -inf for flags; a word with a space in it is none."""
    try:
        float(word)
    except ValueError:
        return word
    return f" {word}" if word.startswith("-") else word


def _run(args: argparse.Namespace) -> int:
    names = [f.name for f in FLOATS]
    if args.format is not None and args.format not in names + [b.name for b in BLOCKS] + [
        i[0] for i in INTEGERS
    ]:
        raise DeploymentError(f"{args.format!r} is not known", field="--format", hint=", ".join(names))
    if args.bits is not None:
        if args.format not in names:
            raise DeploymentError("needs --format " + "|".join(names), field="--bits")
        value = _fields(next(f for f in FLOATS if f.name == args.format), args.bits)
        print(json.dumps({"value": value}) if args.json else repr(value))
        return 0
    if args.value is None:
        rows = table()
    else:
        try:
            value = float(args.value)
        except ValueError:
            raise DeploymentError(f"{args.value[:40]!r} is not a number", field="VALUE") from None
        rows = value_rows(value)
    if args.format is not None:
        rows = [row for row in rows if row["format"] == args.format]
    if args.json:
        print(json.dumps({"rows": [{k: _finite(v) for k, v in row.items()} for row in rows]}, indent=2))
        return 0
    for line in _lines(rows, args.value is None):
        print(line)
    return 0


def _finite(value: Any) -> Any:
    """JSON has no infinity or NaN: their names."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _lines(rows: list[dict[str, Any]], formats: bool) -> list[str]:
    if formats:
        out = [f"{'format':<12}{'s/e/m':>9}{'bytes':>9}{'largest':>14}{'smallest':>14}{'epsilon':>13}  note"]
        for r in rows:
            fields = f"1/{r['exponent']}/{r['mantissa']}" if "exponent" in r else ""
            number = {k: f"{r[k]:.6g}" if k in r else "" for k in ("largest", "smallest", "epsilon")}
            out.append(
                f"{r['format']:<12}{fields:>9}{r['bytes']:>9.4g}{number['largest']:>14}{number['smallest']:>14}"
                f"{number['epsilon']:>13}  {r['note']}".rstrip()
            )
        return out
    out = [f"{'format':<12}{'sign exponent mantissa':<38}{'value':<26}{'error':>10}  what"]
    for r in rows:
        error = f"{r['relative_error']:.2e}" if r.get("relative_error") else ""
        out.append(f"{r['format']:<12}{r.get('bits', ''):<38}{r['value']!r:<26}{error:>10}  {r['what']}")
    return out
