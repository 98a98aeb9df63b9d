"""LLM.int8, NF4 and FP4 of bitsandbytes 0.50 (functional.py), which converts weights while it loads them.

Tests compare the bytes with the package (tests/planner/test_quantization_real.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.fields import AT, flag, skipped
from tonnage.planner.quantization.linear import Kind, LinearFormat, Storages
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.units import ceil_div

_BLOCK = 64  # number of values that share one absmax (scale)
_CODE_BYTES = 16 * 4  # bytes of the code book: 16 levels in fp32
_NESTED_BLOCK = 256  # number of absmax values that share one nested absmax
_NESTED_CODE_BYTES = 256 * 4  # bytes of the nested code book: 256 levels in fp32
_NESTED_OFFSET_BYTES = 4  # bytes of the mean of the absmax values (fp32)
_INT8_ROW_BYTES = 4  # bytes of SCB, one fp32 absmax per output row

# Files store each module's NF4 state as JSON text. It has fixed text, the digits of the shape, and an offset of
# 17 to 22 characters (QuantState.as_dict).
_JSON_DIGITS = (17, 22)


def _int8(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in LLM.int8: one byte per value, an fp32 absmax per row."""
    return {"weight": out * into, "SCB": _INT8_ROW_BYTES * out}


def _four_bits(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in NF4 or FP4: values, code book, plain or nested absmax."""
    blocks = ceil_div(out * into, _BLOCK)
    packed = {"weight": ceil_div(out * into, 2), "code": _CODE_BYTES}
    if not f.double:
        return {**packed, "absmax": 4 * blocks}
    return {
        **packed,
        "absmax": blocks,
        "nested_absmax": 4 * ceil_div(blocks, _NESTED_BLOCK),
        "nested_code": _NESTED_CODE_BYTES,
        "offset": _NESTED_OFFSET_BYTES,
    }


def _after_avx512(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a 4-bit matrix's tensors after the first run of bitsandbytes' AVX-512 kernel.

    The kernel converts absmax to bf16, unpacks nested absmax values and frees their code book (bitsandbytes
    0.50.2, backends/cpu).
    """
    parts = _four_bits(f, out, into, where)
    kept = {"weight": parts["weight"], "code": parts["code"], "absmax": 2 * ceil_div(out * into, _BLOCK)}
    return {**kept, "offset": _NESTED_OFFSET_BYTES} if f.double else kept


def _state_text(f: LinearFormat, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the fewest and the most bytes of the JSON text that a checkpoint stores per 4-bit matrix.

    The length depends on the shape, and on the number of digits of the offset of nested absmax values.
    """
    rows, columns = shape
    text = f'{{"quant_type": "{f.code}", "blocksize": 64, "dtype": "{dtype}", "shape": [{rows}, {columns}]'
    if not f.double:
        return len(text) + 1, len(text) + 1
    text += ', "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": }'
    return len(text) + _JSON_DIGITS[0], len(text) + _JSON_DIGITS[1]


_CLASSES = ("Linear", "Conv1D")
INT8 = Kind(
    "int8", _int8, stored_as="int8", classes=_CLASSES, while_loading=True,
    extra_in_file=lambda f: 1,  # one byte in the file states the weight layout
)  # fmt: skip
FOUR_BITS = Kind(
    "nf4", _four_bits, stored_as="uint8", classes=_CLASSES, while_loading=True,
    warmed={"bitsandbytes-cpu-avx512": _after_avx512}, text_in_file=_state_text,
    # In the file, the offset of nested absmax values is in the JSON text, not in a tensor.
    extra_in_file=lambda f: -_NESTED_OFFSET_BYTES if f.double else 0,
)  # fmt: skip
FLAGS = {
    "int8": LinearFormat(INT8),
    "nf4": LinearFormat(FOUR_BITS),
    "nf4-double": LinearFormat(FOUR_BITS, double=True),
    "fp4": LinearFormat(FOUR_BITS, code="fp4"),
    "fp4-double": LinearFormat(FOUR_BITS, double=True, code="fp4"),
}


def _read(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization that a `quantization_config` of bitsandbytes describes."""
    skip = skipped(found, "llm_int8_skip_modules")
    if found.get("load_in_8bit") is True:
        return Quantization("int8", skip, AT, FLAGS["int8"], method="bitsandbytes")
    if found.get("load_in_4bit") is not True:
        raise ConfigError("neither load_in_8bit nor load_in_4bit is true", field=AT)
    kind = found.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise UnsupportedArchitecture(f"{shown(kind)} is not nf4 or fp4", field=f"{AT}.bnb_4bit_quant_type")
    storage = found.get("bnb_4bit_quant_storage", "uint8")
    if storage not in ("uint8", "torch.uint8"):
        raise UnsupportedArchitecture(f"{shown(storage)} is not uint8", field=f"{AT}.bnb_4bit_quant_storage")
    scheme = f"{kind}-double" if flag(found, "bnb_4bit_use_double_quant", False) else kind
    return Quantization(scheme, skip, AT, FLAGS[scheme], method="bitsandbytes")


READERS = {"bitsandbytes": _read}
