"""Bytes of each tensor after load, under each way of storing weights.

"After load" is what the process holds: the storages of parameters, buffers and quantization state.
Verified against bitsandbytes 0.50 on CPU by tests/planner/test_quantization_real.py (difference 0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.dtypes import ELEMENT_BYTES
from tonnage.planner.errors import ConfigError, DeploymentError, UnsupportedArchitecture
from tonnage.planner.fields import shown

Scheme = Literal["none", "int8", "nf4", "nf4-double", "gptq"]
FLAG_VALUES = ("int8", "nf4", "nf4-double", "gptq")

# bitsandbytes 0.50, functional.py
NF4_BLOCK = 64  # values per absmax
NF4_CODE_BYTES = 16 * 4  # 16 levels, fp32
NESTED_BLOCK = 256  # absmax values per nested absmax
NESTED_CODE_BYTES = 256 * 4  # dynamic map, fp32
NESTED_OFFSET_BYTES = 4  # mean of the absmax values, fp32
INT8_ROW_BYTES = 4  # SCB: one fp32 absmax per output row


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How linear weights are stored. ``skip``: modules left in the model's dtype, None for the default rule.

    Default rule (transformers 5.19, quantizers/base.py get_keys_to_not_convert): the output head, and
    whatever is tied to it. GPTQ fields after the AutoGPTQ checkpoint layout.
    """

    scheme: Scheme = "none"
    skip: tuple[str, ...] | None = None
    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    origin: str = "--quantization"

    def converts(self, tensor: TensorSpec) -> bool:
        """Whether this weight is replaced."""
        if self.scheme == "none" or not tensor.name.endswith(".weight"):
            return False
        # bitsandbytes replaces nn.Linear itself, not subclasses (transformers integrations/bitsandbytes.py)
        classes = ("Linear", "FalconLinear") if self.scheme == "gptq" else ("Linear",)
        if tensor.module_class not in classes:
            return False
        if self.skip is None:
            return tensor.role != "head"
        return not any(_matches(tensor.module, key) for key in self.skip)

    def bytes_after_load(self, tensor: TensorSpec, dtype: str) -> int:
        """Bytes the process holds for ``tensor`` of a model in ``dtype``; 0 for a tied one."""
        if tensor.tied_to is not None:
            return 0
        if not self.converts(tensor):
            return tensor.elements * ELEMENT_BYTES[tensor.dtype or dtype]
        return sum(self.parts(tensor).values())

    def parts(self, tensor: TensorSpec) -> dict[str, int]:
        """The storages of one converted weight [out, in] by name, in bytes."""
        out, into = tensor.shape
        n = out * into
        if self.scheme == "int8":
            return {"weight": n, "SCB": INT8_ROW_BYTES * out}
        if self.scheme == "gptq":
            return self._gptq(tensor, out, into)
        blocks = ceil_div(n, NF4_BLOCK)
        packed = {"weight": ceil_div(n, 2), "code": NF4_CODE_BYTES}
        if self.scheme == "nf4":
            return {**packed, "absmax": 4 * blocks}
        return {
            **packed,
            "absmax": blocks,
            "nested_absmax": 4 * ceil_div(blocks, NESTED_BLOCK),
            "nested_code": NESTED_CODE_BYTES,
            "offset": NESTED_OFFSET_BYTES,
        }

    def _gptq(self, tensor: TensorSpec, out: int, into: int) -> dict[str, int]:
        for size, side in ((into, "in_features"), (out, "out_features")):
            if size * self.bits % 32:
                raise UnsupportedArchitecture(
                    f"{tensor.module}: {side} {size} x {self.bits} bits do not fill 32-bit words",
                    field="quantization_config.bits",
                )
        groups = 1 if self.group_size == -1 else ceil_div(into, self.group_size)
        return {
            "qweight": into * self.bits // 32 * out * 4,
            "qzeros": groups * (out * self.bits // 32) * 4,
            "scales": groups * out * 2,
            "g_idx": into * 4,  # stored with and without desc_act
        }

    def describe(self) -> str:
        if self.scheme == "gptq":
            return f"gptq, {self.bits} bits, group {self.group_size}, desc_act {self.desc_act}, sym {self.sym}"
        return self.scheme


def _matches(module: str, key: str) -> bool:
    """Whether a skip entry names this module: a regular expression at its start, or its end
    (transformers 5.19, quantizers/quantizers_utils.py should_convert_module)."""
    return re.match(key, module) is not None or module.endswith(key)


def read_quantization(config: Mapping[str, Any], flag: str | None) -> Quantization:
    """What the checkpoint's ``quantization_config`` says, or the flag for an unquantized checkpoint.

    Raises DeploymentError when flag and checkpoint contradict, UnsupportedArchitecture for a method that
    is not known, ConfigError for broken fields.
    """
    if flag is not None and flag not in FLAG_VALUES:
        raise DeploymentError(
            f"{shown(flag)} is not known", field="--quantization", hint="one of " + ", ".join(FLAG_VALUES)
        )
    found = config.get("quantization_config")
    if found is None:
        return Quantization() if flag is None else Quantization(scheme=_scheme(flag))
    if not isinstance(found, dict):
        raise ConfigError(f"{shown(found)} is not an object", field="quantization_config")
    stored = _stored(found)
    if flag is not None and flag != stored.scheme:
        raise DeploymentError(
            f"{flag} contradicts the checkpoint, which is quantized as {stored.scheme}",
            field="--quantization",
            hint="leave the flag out",
        )
    return stored


def _scheme(flag: str) -> Scheme:
    schemes: dict[str, Scheme] = {"int8": "int8", "nf4": "nf4", "nf4-double": "nf4-double", "gptq": "gptq"}
    return schemes[flag]


def _stored(found: dict[str, Any]) -> Quantization:
    at = "quantization_config"
    method = found.get("quant_method")
    if method is None and (found.get("load_in_8bit") or found.get("load_in_4bit")):
        method = "bitsandbytes"
    if method == "bitsandbytes":
        skip = _names(found, "llm_int8_skip_modules", at)
        if found.get("load_in_8bit") is True:
            return Quantization("int8", skip=skip, origin=at)
        if found.get("load_in_4bit") is not True:
            raise ConfigError("neither load_in_8bit nor load_in_4bit is true", field=at)
        kind = found.get("bnb_4bit_quant_type", "fp4")
        if kind != "nf4":
            raise UnsupportedArchitecture(f"{shown(kind)} is not nf4", field=f"{at}.bnb_4bit_quant_type")
        storage = found.get("bnb_4bit_quant_storage", "uint8")
        if storage not in ("uint8", "torch.uint8"):
            raise UnsupportedArchitecture(
                f"{shown(storage)} is not uint8", field=f"{at}.bnb_4bit_quant_storage"
            )
        double = _flag(found, "bnb_4bit_use_double_quant", False, at)
        return Quantization("nf4-double" if double else "nf4", skip=skip, origin=at)
    if method == "gptq":
        bits, group = found.get("bits"), found.get("group_size", 128)
        if bits not in (2, 3, 4, 8) or isinstance(bits, bool):
            raise ConfigError(f"{shown(bits)} is not 2, 3, 4 or 8", field=f"{at}.bits")
        if isinstance(group, bool) or not isinstance(group, int) or not (group == -1 or 0 < group <= 1 << 20):
            raise ConfigError(f"{shown(group)} is not -1 or a positive integer", field=f"{at}.group_size")
        for unknown in ("dynamic", "format", "checkpoint_format"):
            value = found.get(unknown)
            if value and value not in ("gptq", "gptq_v2"):
                raise UnsupportedArchitecture(f"{shown(value)} is not planned yet", field=f"{at}.{unknown}")
        if found.get("lm_head"):
            raise UnsupportedArchitecture("a quantized head is not planned yet", field=f"{at}.lm_head")
        return Quantization(
            "gptq",
            skip=_names(found, "modules_to_not_convert", at),
            bits=bits,
            group_size=group,
            desc_act=_flag(found, "desc_act", False, at),
            sym=_flag(found, "sym", True, at),
            origin=at,
        )
    raise UnsupportedArchitecture(
        f"{shown(method)} is not planned yet", field=f"{at}.quant_method", hint="known: bitsandbytes, gptq"
    )


def _flag(found: dict[str, Any], name: str, default: bool, at: str) -> bool:
    value = found.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{shown(value)} is not true or false", field=f"{at}.{name}")
    return value


def _names(found: dict[str, Any], name: str, at: str) -> tuple[str, ...] | None:
    value = found.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{shown(value)} is not a list of module names", field=f"{at}.{name}")
    for item in value:
        # entries are regular expressions: only those that cannot blow up are run
        if not re.fullmatch(r"[\w.*-]{1,200}", item, re.ASCII):
            raise UnsupportedArchitecture(f"{shown(item)} is not a plain module name", field=f"{at}.{name}")
    return tuple(value)


def check_quantization(architecture: Architecture, quantization: Quantization, engine: str) -> None:
    """Refuse a scheme that would do nothing to this model, or something that is not planned.

    Raises DeploymentError or UnsupportedArchitecture.
    """
    if quantization.scheme == "none":
        return
    if engine == "vllm" and quantization.scheme != "gptq":
        raise DeploymentError(
            f"{quantization.scheme} under vLLM is not planned yet",
            field=quantization.origin,
            hint="use --engine hf",
        )
    converted = [tensor for tensor in architecture.tensors if quantization.converts(tensor)]
    if not converted:
        raise DeploymentError(
            f"{quantization.scheme} replaces no module of {architecture.class_name}: "
            "its linear layers are not of the class nn.Linear",
            field=quantization.origin,
        )
    for tensor in converted:
        if tensor.tied_to is not None:
            raise UnsupportedArchitecture(
                f"{tensor.name} is tied to {tensor.tied_to} and not among the modules left alone",
                field=f"{quantization.origin}.llm_int8_skip_modules",
            )
