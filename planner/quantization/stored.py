"""``quantization_config`` of a checkpoint -> Quantization, method by method.

Each method's own exclusion list is honoured: llm_int8_skip_modules and modules_to_not_convert (transformers),
ignore (compressed-tensors), exclude_modules and quantized_layers (ModelOpt), dynamic (GPTQModel).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families.registry import family_of
from tonnage.planner.model.fields import shown
from tonnage.planner.quantization.formats import LinearFormat
from tonnage.planner.quantization.rules import Patterns, compile_patterns, spelling
from tonnage.planner.quantization.scheme import Quantization

AT = "quantization_config"


def read_stored(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """Raises UnsupportedArchitecture for a method that is not known, ConfigError for broken fields."""
    method = found.get("quant_method")
    if method is None and (found.get("load_in_8bit") or found.get("load_in_4bit")):
        method = "bitsandbytes"
    if method is None and "quant_algo" in found:
        method = "modelopt"
    if isinstance(method, str) and method == "fp8" and found.get("quantized_layers"):
        method = "fp8-mixed"
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise UnsupportedArchitecture(
            f"{shown(method)} is not planned yet",
            field=f"{AT}.quant_method",
            hint="known: " + ", ".join(_READERS),
        )
    return reader(found, config)


def _bitsandbytes(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    skip = _skip(found, "llm_int8_skip_modules")
    if found.get("load_in_8bit") is True:
        return Quantization("int8", skip=skip, origin=AT, method="bitsandbytes")
    if found.get("load_in_4bit") is not True:
        raise ConfigError("neither load_in_8bit nor load_in_4bit is true", field=AT)
    kind = found.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise UnsupportedArchitecture(f"{shown(kind)} is not nf4 or fp4", field=f"{AT}.bnb_4bit_quant_type")
    storage = found.get("bnb_4bit_quant_storage", "uint8")
    if storage not in ("uint8", "torch.uint8"):
        raise UnsupportedArchitecture(f"{shown(storage)} is not uint8", field=f"{AT}.bnb_4bit_quant_storage")
    double = _flag(found, "bnb_4bit_use_double_quant", False)
    return Quantization(f"{kind}-double" if double else kind, skip=skip, origin=AT, method="bitsandbytes")


def _gptq(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    bits, group = _bits(found, "bits", (2, 3, 4, 8)), _group(found, 128)
    for unknown in ("format", "checkpoint_format"):
        value = found.get(unknown)
        if value and value not in ("gptq", "gptq_v2"):
            raise UnsupportedArchitecture(f"{shown(value)} is not planned yet", field=f"{AT}.{unknown}")
    if found.get("lm_head"):
        raise UnsupportedArchitecture("a quantized head is not planned yet", field=f"{AT}.lm_head")
    act_order = _flag(found, "desc_act", False)
    return Quantization(
        "gptq",
        skip=_gptq_skip(found),
        bits=bits,
        group_size=group,
        desc_act=act_order,
        sym=_flag(found, "sym", True),
        origin=AT,
        linear=LinearFormat("gptq", bits, group, act_order=act_order),
        method="gptq",
    )


def _gptq_skip(found: dict[str, Any]) -> Patterns | None:
    """GPTQModel's ``dynamic``: keys that begin with ``-:`` are left alone; other keys change bits or groups."""
    names = list(_names(found, "modules_to_not_convert") or ())
    dynamic = found.get("dynamic")
    if dynamic:
        if not isinstance(dynamic, dict):
            raise ConfigError(f"{shown(dynamic)} is not an object", field=f"{AT}.dynamic")
        for key in dynamic:
            if not isinstance(key, str) or not key.startswith("-:"):
                raise UnsupportedArchitecture(
                    f"{shown(key)}: other bits for some modules are not planned yet", field=f"{AT}.dynamic"
                )
            names.append("re:" + key[2:])
    return compile_patterns(names, f"{AT}.modules_to_not_convert") if names else None


def _awq(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    bits, group = _bits(found, "bits" if "bits" in found else "w_bit", (4,)), _group(found, 128)
    version = found.get("version", "gemm")
    if not isinstance(version, str) or version.lower() not in ("gemm", "gemv", "marlin"):
        raise UnsupportedArchitecture(f"{shown(version)} is not planned yet", field=f"{AT}.version")
    skip = _skip(found, "modules_to_not_convert")
    made = LinearFormat("awq", bits, group)
    return Quantization("awq", skip=skip, bits=bits, group_size=group, origin=AT, linear=made, method="awq")


def _fp8(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """DeepSeek's and transformers' FP8: blocks of 128 x 128 with an fp32 scale, or one scale per matrix."""
    block = found.get("weight_block_size")
    static = _activations(found)
    if block is not None and (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(v) is int and 0 < v <= 1 << 16 for v in block)
    ):
        raise ConfigError(f"{shown(block)} is not two positive integers", field=f"{AT}.weight_block_size")
    size = (block[0], block[1]) if block else None
    files = family_of(config.get("model_type")).files
    exponent = found.get("scale_fmt") == "ue8m0" and files.exponent_scales
    made = LinearFormat("fp8", block=size, input_scale=static, scale_bytes=1 if exponent else 4)
    experts = LinearFormat("mxfp4") if config.get("expert_dtype") == "fp4" else None
    skip = _skip(found, "modules_to_not_convert", "ignored_layers")
    return Quantization(
        "fp8-block" if block else "fp8", skip=skip, origin=AT, linear=made, experts=experts, method="fp8"
    )


def _activations(found: dict[str, Any]) -> bool:
    scheme = found.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static", None):
        raise UnsupportedArchitecture(
            f"{shown(scheme)} is not dynamic or static", field=f"{AT}.activation_scheme"
        )
    return bool(scheme == "static")


def _fbgemm(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """FBGEMM: an fp32 scale per output row."""
    skip = _skip(found, "modules_to_not_convert")
    made = LinearFormat("fp8", block=(1, 0))
    return Quantization("fp8-channel", skip=skip, origin=AT, linear=made, method="fbgemm_fp8")


def _mxfp4(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """gpt-oss: the routed experts only."""
    skip = _skip(found, "modules_to_not_convert")
    if skip is None:
        skip = compile_patterns(["*.self_attn.*", "*.router", "lm_head"], AT)
    return Quantization("mxfp4", skip=skip, origin=AT, linear=LinearFormat("mxfp4"), method="mxfp4")


def _compressed(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """compressed-tensors: one or more groups of targets, each with its weights' scheme."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{shown(groups)} is not an object of groups", field=f"{AT}.config_groups")
    skip = _skip(found, "ignore")
    width = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    made: list[tuple[str, LinearFormat, list[str]]] = []
    for name, group in groups.items():
        where = f"{AT}.config_groups.{name}"
        if not isinstance(group, dict):
            raise ConfigError(f"{shown(group)} is not an object", field=where)
        stored = group.get("format") or found.get("format")
        made.append((*_compressed_group(group, stored, where, width), _targets(group, where)))
    plain = [entry for entry in made if "Linear" in entry[2]]
    if len(made) == 1 and plain:
        scheme, linear, _ = plain[0]
        return Quantization(scheme, skip=skip, origin=AT, linear=linear, method="compressed-tensors")
    return _compressed_mixed(made, skip)


def _compressed_mixed(made: list[tuple[str, LinearFormat, list[str]]], skip: Patterns | None) -> Quantization:
    """Two groups, of which one is about routed experts: the only mix found in published files."""
    experts = [e for e in made if all("experts" in target for target in e[2])]
    others = [e for e in made if e not in experts]
    if len(experts) != 1 or len(others) != 1:
        raise UnsupportedArchitecture(
            "several groups that are not attention and experts are not planned", field=f"{AT}.config_groups"
        )
    return Quantization(
        f"{others[0][0]}+{experts[0][0]}", skip=skip, origin=AT, linear=others[0][1], experts=experts[0][1],
        method="compressed-tensors",
    )  # fmt: skip


def _targets(group: dict[str, Any], where: str) -> list[str]:
    targets = group.get("targets", ["Linear"])
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ConfigError(f"{shown(targets)} is not a list of names", field=f"{where}.targets")
    return targets


def _compressed_group(
    group: dict[str, Any], stored: object, where: str, width: int
) -> tuple[str, LinearFormat]:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f"{shown(weights)} is not an object", field=f"{where}.weights")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    inputs = group.get("input_activations")
    static = isinstance(inputs, dict) and inputs.get("dynamic") is False
    group_size = weights.get("group_size") or -1
    if kind == "float" and bits == 8:
        return "fp8", LinearFormat(
            "fp8", block=_strategy(weights, where), scale_bytes=width, input_scale=static
        )
    if kind == "float" and bits == 4 and stored == "mxfp4-pack-quantized":
        return "mxfp4", LinearFormat("mxfp4")
    if kind == "float" and bits == 4 and group_size == 16:
        # a global scale of the inputs is stored with dynamic activations too ("local")
        return "nvfp4", LinearFormat("nvfp4", input_scale=inputs is not None)
    if kind == "int" and stored == "pack-quantized" and bits in (4, 8):
        act_order = weights.get("actorder") in ("group", "dynamic", True)
        return f"w{bits}a16", LinearFormat(
            "packed", bits, group_size if strategy == "group" else -1, scale_bytes=width,
            zero_points=weights.get("symmetric") is False, act_order=act_order,
        )  # fmt: skip
    if kind == "int" and bits == 8:
        block = _strategy(weights, where)
        return "w8a8", LinearFormat("int-w8", block=block, scale_bytes=width, input_scale=static)
    raise UnsupportedArchitecture(
        f"{bits} bits of {shown(kind)} stored as {shown(stored)} are not planned yet", field=f"{where}.weights"
    )


def _strategy(weights: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Which values share a scale: tensor, channel (a row), group, block."""
    strategy = weights.get("strategy", "tensor")
    if strategy == "tensor":
        return None
    if strategy == "channel":
        return (1, 0)
    if strategy == "group":
        size = weights.get("group_size")
        if type(size) is int and size > 0:
            return (1, size)
    block = weights.get("block_structure")
    if (
        strategy == "block"
        and isinstance(block, list)
        and len(block) == 2
        and all(type(b) is int for b in block)
    ):
        return (block[0], block[1])
    raise UnsupportedArchitecture(f"{shown(strategy)} is not planned yet", field=f"{where}.weights.strategy")


_MODELOPT = {
    "FP8": LinearFormat("fp8", input_scale=True),
    "FP8_PER_CHANNEL_PER_TOKEN": LinearFormat("fp8", block=(1, 0)),
    "FP8_PB_WO": LinearFormat("fp8", block=(128, 128)),
    "NVFP4": LinearFormat("nvfp4", input_scale=True),
    "W4A16_NVFP4": LinearFormat("nvfp4"),
    "NVFP4_AWQ": LinearFormat("nvfp4", input_scale=True),
    "MXFP8": LinearFormat("mxfp8"),
    "MXFP4": LinearFormat("mxfp4"),
}


def _modelopt(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """ModelOpt: one algorithm with excluded modules, or MIXED_PRECISION with an algorithm per layer.

    Without an exclusion list only the output head stays in 16 bits (ModelOpt 0.33 excludes it by default).
    """
    algorithm = found.get("quant_algo")
    skip = _skip(found, "exclude_modules", "ignore")
    layers = found.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" or (algorithm is None and layers):
        return Quantization("modelopt-mixed", skip=skip, origin=AT, named=_layers(layers), method="modelopt")
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise UnsupportedArchitecture(f"{shown(algorithm)} is not planned yet", field=f"{AT}.quant_algo")
    return Quantization(algorithm.lower(), skip=skip, origin=AT, linear=_MODELOPT[algorithm], method="modelopt")


def _layers(layers: object) -> dict[str, LinearFormat]:
    if not isinstance(layers, dict) or not layers:
        raise ConfigError(f"{shown(layers)} is not an object of layers", field=f"{AT}.quantized_layers")
    out = {}
    for name, entry in layers.items():
        algorithm = entry.get("quant_algo") if isinstance(entry, dict) else None
        if algorithm not in _MODELOPT:
            raise UnsupportedArchitecture(
                f"{shown(algorithm)} is not planned yet", field=f"{AT}.quantized_layers.{name[:80]}"
            )
        out[spelling(name)] = _MODELOPT[algorithm]
    return out


def _fp8_mixed(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    """DeepSeek-V4 by ModelOpt: named experts in NVFP4, the rest in the FP8 blocks of the original."""
    base = _fp8({k: v for k, v in found.items() if k != "quantized_layers"}, config)
    named = _layers(found["quantized_layers"])
    kinds = set(named.values())
    if len(kinds) != 1 or not all(name.endswith("experts") for name in named):
        raise UnsupportedArchitecture("only experts are known to differ", field=f"{AT}.quantized_layers")
    return Quantization(
        "fp8-block+nvfp4", origin=AT, linear=base.linear, experts=kinds.pop(), method="modelopt"
    )


def _hqq(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    inner = found.get("quant_config")
    weights = inner.get("weight_quant_params") if isinstance(inner, dict) else None
    if not isinstance(weights, dict):
        raise UnsupportedArchitecture("parameters per layer are not planned yet", field=f"{AT}.quant_config")
    bits = _bits(weights, "nbits", (1, 2, 3, 4, 8))
    if bits == 3:
        raise UnsupportedArchitecture("3 bits are not planned yet", field=f"{AT}.quant_config.nbits")
    skip = _skip(found, "skip_modules")
    made = LinearFormat("hqq", bits, _group(weights, 64))
    return Quantization("hqq", skip=skip, bits=bits, origin=AT, linear=made, method="hqq")


def _torchao(found: dict[str, Any], config: Mapping[str, Any]) -> Quantization:
    kind = found.get("quant_type")
    if isinstance(kind, dict):  # the dataclass of torchao >= 0.9, as JSON
        inner = kind.get("default", kind)
        kind = inner.get("_type") if isinstance(inner, dict) else None
        arguments = inner.get("_data", {}) if isinstance(inner, dict) else {}
    else:
        arguments = found.get("quant_type_kwargs") or {}
    skip = _skip(found, "modules_to_not_convert")
    if kind in ("int4_weight_only", "Int4WeightOnlyConfig"):
        made = LinearFormat("torchao-int4", group_size=arguments.get("group_size", 128))
        return Quantization("torchao-int4", skip=skip, origin=AT, linear=made, method="torchao")
    if kind in ("int8_weight_only", "Int8WeightOnlyConfig"):
        made = LinearFormat("torchao-int8", scale_bytes=2)
        return Quantization("torchao-int8", skip=skip, origin=AT, linear=made, method="torchao")
    raise UnsupportedArchitecture(f"{shown(kind)} is not planned yet", field=f"{AT}.quant_type")


_READERS: dict[str, Callable[[dict[str, Any], Mapping[str, Any]], Quantization]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fp8-mixed": _fp8_mixed,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "hqq": _hqq,
    "torchao": _torchao,
}


def _bits(found: dict[str, Any], name: str, allowed: tuple[int, ...]) -> int:
    bits = found.get(name)
    if isinstance(bits, bool) or bits not in allowed:
        listed = ", ".join(map(str, allowed[:-1])) + (" or " if len(allowed) > 1 else "") + str(allowed[-1])
        raise ConfigError(f"{shown(bits)} is not {listed}", field=f"{AT}.{name}")
    return int(bits)


def _group(found: dict[str, Any], default: int) -> int:
    name = "q_group_size" if "q_group_size" in found else "group_size"
    group = found.get(name, default)
    if isinstance(group, bool) or not isinstance(group, int) or not (group == -1 or 0 < group <= 1 << 20):
        raise ConfigError(f"{shown(group)} is not -1 or a positive integer", field=f"{AT}.{name}")
    return group


def _flag(found: dict[str, Any], name: str, default: bool) -> bool:
    value = found.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{shown(value)} is not true or false", field=f"{AT}.{name}")
    return value


def _names(found: dict[str, Any], name: str) -> list[str] | None:
    value = found.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{shown(value)} is not a list of module names", field=f"{AT}.{name}")
    return value


def _skip(found: dict[str, Any], *names: str) -> Patterns | None:
    """The first of these lists the file has."""
    for name in names:
        values = _names(found, name)
        if values is not None:
            return compile_patterns(values, f"{AT}.{name}")
    return None
