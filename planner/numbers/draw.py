"""Text drawing of a number's bits in a floating-point format, with the formula of its value."""

from __future__ import annotations

import math

from tonnage.planner.numbers.formats import FloatFormat, Real, is_finite, relative_error, size_of


def drawn(f: FloatFormat, value: Real, said: str) -> list[str]:
    """Return lines of text that show a number's sign, exponent and mantissa bits and what they mean.

    Args:
        f: the number format.
        value: the exact value before rounding to the format.
        said: the number as the user wrote it.
    """
    sign, exponent, mantissa = f.encode(value)
    stored = f.decode(sign, exponent, mantissa)
    after = " " * f.exponent  # spaces that align the mantissa's label with its first bit
    lines = [
        f"{f.name}: 1 bit of sign, {f.exponent} of exponent (bias 2^{f.exponent - 1} - 1 = {f.bias}), "
        f"{f.mantissa} of mantissa",
        f"  {f.pattern(sign, exponent, mantissa)}",
        f"  | |{after}+- mantissa {mantissa}{_fraction(f, exponent, mantissa, stored)}",
        f"  | +- exponent {exponent}{_power(f, exponent, stored)}",
        f"  +- sign {sign}: {'-' if sign else '+'}",
        f"  {f.formula(sign, exponent, mantissa)} = {stored!r}",
    ]
    if is_finite(value) and size_of(value) > f.largest and (math.isinf(stored) or f.overflow == "saturate"):
        becomes = "infinity" if math.isinf(stored) else "it, as conversions that saturate do"
        lines.append(f"  Overflow: the largest value is {f.largest!r}, and {said[:40]} becomes {becomes}.")
    elif is_finite(value) and value != 0 and stored == 0:
        lines.append(f"  Underflow: the smallest value is {f.smallest!r}, and {said[:40]} becomes 0.")
    elif stored != value and (error := relative_error(value, stored)) is not None:
        lines.append(
            f"  relative error |{stored!r} - {said[:40]}| / |{said[:40]}| = {error:.2e}"
            + ("" if exponent == 0 else f", at most 2^-{f.mantissa + 1} = {2.0 ** -(f.mantissa + 1):.2e}")
        )
    return lines


def _fraction(f: FloatFormat, exponent: int, mantissa: int, stored: float) -> str:
    if not math.isfinite(stored):
        return ": 0 means infinity, anything else NaN" if not f.nan_at_top else ": all ones mean NaN"
    first = 0 if exponent == 0 else 1
    return f": {first} + {mantissa}/2^{f.mantissa} = {first + mantissa / (1 << f.mantissa)!r}"


def _power(f: FloatFormat, exponent: int, stored: float) -> str:
    if not math.isfinite(stored):
        return ", all ones: no number"
    if exponent == 0:
        return f", subnormal: 2^(1 - {f.bias}) = 2^{1 - f.bias}"
    return f": 2^({exponent} - {f.bias}) = 2^{exponent - f.bias}"
