"""Number formats bit by bit: exact encoding, decoding, rounding and overflow with integers and fractions.

- IEEE 754 binary32 and binary16
- bfloat16 and TF32 (NVIDIA A100 whitepaper)
- OCP 8-bit floating point (E4M3, E5M2)
- OCP microscaling MX 1.0 (E2M1 elements, one E8M0 scale per 32 values)
- NVFP4 (E2M1, one E4M3 scale per 16 values and one fp32 per tensor)
- NF4 (QLoRA, arXiv 2305.14314, appendix E)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Overflow = Literal["infinity", "saturate"]
Real = float | Fraction


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point format with one sign bit, `exponent` bits and `mantissa` bits.

    Attributes:
        stored_bits: bits that one value occupies in memory (tf32: 32).
        overflow: what a value that is too large becomes: `infinity`, or with `saturate` the largest number.
        top_exponent_is_number: whether the largest exponent field encodes finite numbers too (E4M3, E2M1), not
            only infinity and NaN.
        nan_at_top: whether only the pattern with all exponent and mantissa bits set is NaN (E4M3).
        scale: text about storage or scaling, for the printed table of formats.
    """

    name: str
    exponent: int
    mantissa: int
    stored_bits: int
    overflow: Overflow
    top_exponent_is_number: bool = False
    nan_at_top: bool = False
    scale: str = ""

    @property
    def bits(self) -> int:
        """Return the number of bits of one value: sign, exponent and mantissa together."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """Return the exponent bias: an exponent field with value e means a factor of 2^(e - bias)."""
        return int((1 << (self.exponent - 1)) - 1)

    @property
    def top(self) -> int:
        """Return the largest exponent field (as an integer) of a finite number in the format."""
        return (1 << self.exponent) - (1 if self.top_exponent_is_number else 2)

    @property
    def top_mantissa(self) -> int:
        """Return the mantissa field (as an integer) of the largest finite number in the format."""
        return (1 << self.mantissa) - 1 - (1 if self.nan_at_top else 0)

    @property
    def largest(self) -> float:
        """Return the largest finite number of the format."""
        return math.ldexp((1 << self.mantissa) + self.top_mantissa, self.top - self.bias - self.mantissa)

    @property
    def smallest_normal(self) -> float:
        """Return the smallest positive normal number of the format."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest(self) -> float:
        """Return the smallest positive (subnormal) number of the format."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa)

    def decode(self, sign: int, exponent: int, mantissa: int) -> float:
        """Return the value, possibly infinity or NaN, of a sign bit, an exponent field and a mantissa field."""
        if not self.top_exponent_is_number and exponent == (1 << self.exponent) - 1:
            return math.nan if mantissa else (-math.inf if sign else math.inf)
        if self.nan_at_top and exponent == self.top and mantissa == (1 << self.mantissa) - 1:
            return math.nan
        if exponent == 0:
            value = math.ldexp(mantissa, 1 - self.bias - self.mantissa)
        else:
            value = math.ldexp((1 << self.mantissa) + mantissa, exponent - self.bias - self.mantissa)
        return -value if sign else value

    def encode(self, value: Real) -> tuple[int, int, int]:
        """Return the bits of `value` in this format: (sign, exponent field, mantissa field).

        The value is rounded to nearest, ties to even.
        """
        if isinstance(value, float) and not (math.isfinite(value) and value):
            sign = 1 if math.copysign(1.0, value) < 0 else 0
            if math.isnan(value):
                return self._nan(sign)
            return (sign, 0, 0) if value == 0 else self._too_large(sign)
        sign, size = (1 if value < 0 else 0), abs(Fraction(value))
        if size == 0:
            return sign, 0, 0
        # `power` is such that 2^(power-1) < size < 2^(power+1).
        power = size.numerator.bit_length() - size.denominator.bit_length()
        if size < Fraction(2) ** power:
            power -= 1
        exponent = max(power + self.bias, 1)
        steps = round(
            size * Fraction(2) ** (self.bias + self.mantissa - exponent)
        )  # round() rounds ties to even
        if steps >= 2 << self.mantissa:
            steps, exponent = steps >> 1, exponent + 1
        if steps < 1 << self.mantissa:
            return sign, 0, steps
        mantissa = steps - (1 << self.mantissa)
        if (exponent, mantissa) > (self.top, self.top_mantissa):
            return self._too_large(sign)
        return sign, exponent, mantissa

    def _nan(self, sign: int) -> tuple[int, int, int]:
        if self.top_exponent_is_number and not self.nan_at_top:
            return sign, self.top, self.top_mantissa  # E2M1 has no NaN; use the largest number
        ones = (1 << self.exponent) - 1
        return sign, ones, (1 << self.mantissa) - 1 if self.nan_at_top else 1 << (self.mantissa - 1)

    def _too_large(self, sign: int) -> tuple[int, int, int]:
        if self.overflow == "infinity":
            return sign, (1 << self.exponent) - 1, 0
        return sign, self.top, self.top_mantissa

    def formula(self, sign: int, exponent: int, mantissa: int) -> str:
        """Return the formula, with numbers filled in, of the value that the three bit fields encode."""
        value = self.decode(sign, exponent, mantissa)
        if not math.isfinite(value):
            return "exponent all ones"
        if exponent == 0:
            return f"(-1)^{sign} x 2^(1 - {self.bias}) x (0 + {mantissa}/2^{self.mantissa})"
        return f"(-1)^{sign} x 2^({exponent} - {self.bias}) x (1 + {mantissa}/2^{self.mantissa})"

    def pattern(self, sign: int, exponent: int, mantissa: int) -> str:
        """Return a number's sign, exponent and mantissa fields in binary, for example `0 10000000 1001...`."""
        return f"{sign} {exponent:0{self.exponent}b} {mantissa:0{self.mantissa}b}"


def is_finite(value: Real) -> bool:
    """Return whether a number is finite; unlike math.isfinite, it accepts fractions above the largest float."""
    return isinstance(value, Fraction) or math.isfinite(value)


def size_of(value: Real) -> Real:
    """Return the absolute value of a float or fraction."""
    return -value if value < 0 else value


def relative_error(value: Real, stored: float) -> float | None:
    """Return the relative error |stored - value| / |value|; None where it is undefined (zero, infinity)."""
    if not math.isfinite(stored) or not is_finite(value) or value == 0:
        return None
    return float(abs(Fraction(stored) - Fraction(value)) / abs(Fraction(value)))


FLOATS = (
    FloatFormat("fp32", 8, 23, 32, "infinity"),
    FloatFormat("tf32", 8, 10, 32, "infinity", scale="19 bits used, stored in 4 bytes"),
    FloatFormat("fp16", 5, 10, 16, "infinity"),
    FloatFormat("bf16", 8, 7, 16, "infinity"),
    # For a value above the largest number, OCP OFP8 1.0 allows a conversion either to saturate or to return
    # NaN. The method .to() of torch 2.13 saturates for E4M3, but not for E5M2.
    FloatFormat(
        "fp8_e4m3",
        4,
        3,
        8,
        "saturate",
        top_exponent_is_number=True,
        nan_at_top=True,
        scale="too large: saturates (torch 2.13), NaN in OCP's other mode",
    ),
    FloatFormat("fp8_e5m2", 5, 2, 8, "infinity"),
    FloatFormat("fp4_e2m1", 2, 1, 4, "saturate", top_exponent_is_number=True),
)

INTEGERS = (("int8", -128, 127, 8), ("int4", -8, 7, 4))

# The 16 values of the NF4 format (QLoRA, arXiv 2305.14314, appendix E)
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """A block format: a number format in which a group of values has one common scale.

    Attributes:
        bits: bits of one value.
        group: values per scale.
        scale_bits: bits of one scale.
    """

    name: str
    bits: int
    group: int
    scale_bits: int
    what: str

    @property
    def bits_per_value(self) -> float:
        """Return the average bits per value: the bits of one value plus scale_bits / group."""
        return self.bits + self.scale_bits / self.group


BLOCKS = (
    Block("mxfp4", 4, 32, 8, "E2M1 values, one E8M0 scale (a power of two) per 32"),
    Block("nvfp4", 4, 16, 8, "E2M1 values, one E4M3 scale per 16 and one fp32 per tensor"),
    Block("nf4", 4, 64, 32, "16 levels of a normal distribution, one fp32 absmax per 64"),
    Block("nf4-double", 4, 64, 8, "the same, the absmax itself in 8 bits with one fp32 per 256 of them"),
)


def nearest_nf4(value: Real) -> tuple[int, float]:
    """Return (index, level) of the nearest of NF4's 16 levels to a value in [-1, 1]."""
    index = min(range(16), key=lambda i: abs(NF4_LEVELS[i] - value))
    return index, NF4_LEVELS[index]
