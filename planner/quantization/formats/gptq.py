"""GPTQ and AWQ: packed integers in 32-bit words, a scale and a zero point per group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.fields import AT, bits_of, flag, group_of, names_in, skipped
from tonnage.planner.quantization.linear import Kind, LinearFormat, Storages
from tonnage.planner.quantization.rules import Patterns, compile_patterns
from tonnage.planner.quantization.scheme import Quantization


def _words(f: LinearFormat, out: int, into: int, where: str, packed: dict[str, int]) -> Storages:
    """Return the bytes of the stored tensors of a matrix that GPTQ and AWQ have in common.

    These are packed values, packed zero points and 16-bit scales. `packed` maps the name of each packed
    dimension (inputs, outputs) to its length.

    Raises:
        UnsupportedArchitecture: a packed dimension does not fill whole 32-bit words.
    """
    for side, size in packed.items():
        if size * f.bits % 32:
            raise UnsupportedArchitecture(
                f"{where}: {side} = {size} values of {f.bits} bits do not fill whole 32-bit words",
                field="quantization_config.bits",
            )
    groups = f.groups(into)
    return {
        "qweight": into * out * f.bits // 8,
        "qzeros": groups * (out * f.bits // 32) * 4,
        "scales": groups * out * 2,
    }


def _gptq(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in GPTQ: packed along the inputs, a group index per input.

    The group index is stored even if the checkpoint was made without act-order (desc_act false).
    """
    parts = _words(f, out, into, where, {"in_features": into, "out_features": out})
    return {**parts, "g_idx": into * 4}


def _awq(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in AWQ: packed along the outputs, without group indices."""
    return _words(f, out, into, where, {"out_features": out})


def _shifts(f: LinearFormat) -> int:
    """Return the bytes of the int32 shifts that unpack a 32-bit word."""
    return 4 * (36 if f.bits == 3 else 32 // f.bits)


def _gptqmodel(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in GPTQModel's kernels, which keep int32 shifts for unpacking.

    Source: gptqmodel 7.7, nn_modules/qlinear/__init__.py, wf_unsqueeze_zero.
    """
    return {**_gptq(f, out, into, where), "wf_unsqueeze": _shifts(f)}


def _gptqmodel_warm(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors after the first run of GPTQModel's AVX-512 kernel.

    The kernel converts scales to fp32 and unpacks zero points to one byte each. It keeps an index of the order
    of the inputs, in addition to their group indices. Source: gptqmodel 7.7,
    nn_modules/qlinear/torch_cpu_avx512.py; measured by tests/gptq/test_gptq_real.py.
    """
    parts = {**_gptq(f, out, into, where), **_unpacked(f, out, into)}
    return {**parts, "ret_idx": 4 * into, "wf_unsqueeze": _shifts(f)}


def _gptqmodel_awq_warm(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors after the first run of GPTQModel's AVX-512 kernel for AWQ.

    The kernel converts scales to fp32 and unpacks zero points to one byte each. Source: gptqmodel 7.7,
    torch_cpu_avx512_awq.py; measured by tests/gptq/test_gptq_served.py.
    """
    return {**_awq(f, out, into, where), **_unpacked(f, out, into)}


def _unpacked(f: LinearFormat, out: int, into: int) -> Storages:
    """Return the bytes of a matrix's unpacked scales (fp32) and zero points (one byte each)."""
    groups = f.groups(into)
    return {"scales": 4 * groups * out, "qzeros": groups * out}


def _vllm_cpu(f: LinearFormat, out: int, into: int, where: str) -> Storages:
    """Return the bytes of a matrix's tensors in vLLM's 4-bit CPU kernel: no zero points or group indices.

    The kernel supports only formats whose zero points are all equal. Sources: vLLM 0.32.0, auto_gptq.py and
    kernels/linear/mixed_precision/cpu.py; measured by tests/server/test_both_engines.py.
    """
    parts = _gptq(f, out, into, where)
    return {name: parts[name] for name in ("qweight", "scales")}


def _details(f: LinearFormat) -> str:
    """Return the details of a GPTQ format as text, such as its group size."""
    return f"{f.bits} bits, group {f.group_size}, desc_act {f.act_order}, sym {f.symmetric}"


GPTQ = Kind(
    "gptq", _gptq, suffix=".qweight", stored_as="int32", classes=("Linear", "FalconLinear"),
    language_model_only=True, detail=_details,
    loaded={"gptqmodel-cpu-avx512": _gptqmodel, "vllm-cpu-wna16": _vllm_cpu},
    warmed={"gptqmodel-cpu-avx512": _gptqmodel_warm},
)  # fmt: skip
AWQ = Kind(
    "awq", _awq, suffix=".qweight", language_model_only=True,
    detail=lambda f: f"{f.bits} bits, group {f.group_size}",
    warmed={"gptqmodel-cpu-avx512": _gptqmodel_awq_warm},
)  # fmt: skip
FLAGS = {"gptq": LinearFormat(GPTQ), "awq": LinearFormat(AWQ)}


def _read_gptq(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization that a `quantization_config` of GPTQ describes."""
    bits, group = bits_of(found, "bits", (2, 3, 4, 8)), group_of(found, 128)
    for unknown in ("format", "checkpoint_format"):
        value = found.get(unknown)
        if value and value not in ("gptq", "gptq_v2"):
            raise UnsupportedArchitecture(f"{shown(value)} is not supported yet", field=f"{AT}.{unknown}")
    if found.get("lm_head"):
        raise UnsupportedArchitecture("a quantized output head is not supported yet", field=f"{AT}.lm_head")
    act_order, skip = flag(found, "desc_act", False), _unquantized(found)
    made = LinearFormat(GPTQ, bits, group, act_order=act_order, symmetric=flag(found, "sym", True))
    return Quantization("gptq", skip, AT, made, method="gptq")


def _unquantized(found: dict[str, Any]) -> Patterns | None:
    """Return the modules that stay unquantized, from modules_to_not_convert and GPTQModel's `dynamic`.

    A key of `dynamic` that begins with `-:` excludes modules. Other keys change bits or group sizes of modules,
    which is not supported and raises an error.
    """
    names = list(names_in(found, "modules_to_not_convert") or ())
    dynamic = found.get("dynamic")
    if dynamic:
        if not isinstance(dynamic, dict):
            raise ConfigError(f"{shown(dynamic)} is not an object", field=f"{AT}.dynamic")
        for key in dynamic:
            if not isinstance(key, str) or not key.startswith("-:"):
                raise UnsupportedArchitecture(
                    f"{shown(key)}: modules with a different bit width are not supported yet",
                    field=f"{AT}.dynamic",
                )
            names.append("re:" + key[2:])
    return compile_patterns(names, f"{AT}.modules_to_not_convert") if names else None


def _read_awq(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Return the quantization that a `quantization_config` of AWQ describes."""
    bits, group = bits_of(found, "bits" if "bits" in found else "w_bit", (4,)), group_of(found, 128)
    version = found.get("version", "gemm")
    if not isinstance(version, str) or version.lower() not in ("gemm", "gemv", "marlin"):
        raise UnsupportedArchitecture(f"{shown(version)} is not supported yet", field=f"{AT}.version")
    skip = skipped(found, "modules_to_not_convert")
    return Quantization("awq", skip, AT, LinearFormat(AWQ, bits, group), method="awq")


READERS = {"gptq": _read_gptq, "awq": _read_awq}
