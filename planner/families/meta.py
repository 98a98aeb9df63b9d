"""Fallback for model types that the planner cannot build: build transformers' model on PyTorch's meta device.

The tensors of the plan are the parameters and buffers of this model. The cache layers are those that one
forward pass over a few tokens fills in a DynamicCache. Module names determine only the role of each tensor,
which decides whether a quantizer replaces it and in which group its bytes are counted.

This fallback is slower than a family's own builder function, because it imports torch and transformers. It
plans a single rank only, because it is not known how an engine would divide these modules. Remote code is never
run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tonnage.planner.errors import TonnageError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture, CacheLayer, Rotary
from tonnage.planner.model.fields import LIMITS, shown
from tonnage.planner.model.tensor import Role, TensorSpec

# Cache classes of transformers that keep only keys and values; its other classes also keep recurrent states.
_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
# Auto classes of models that generate text, and their class tables in modeling_auto (transformers 5.19)
_AUTO = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
_TOKENS = 8  # number of tokens in the forward pass that fills the cache
_ENCODER_DECODER = "the planner cannot build encoder-decoder models of this model_type"
_INSTALL = "pip install 'tonnage[hf]' plans it from transformers' own model code"


def meta_architecture(config: Mapping[str, Any], refusal: UnsupportedArchitecture) -> Architecture:
    """Return the architecture of a model that transformers can build, but no family of the planner.

    Raises:
        UnsupportedArchitecture: ``refusal`` itself if transformers does not know the model_type; otherwise an
            error that names the unsupported part of the model.
    """
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UnsupportedArchitecture(refusal.message, field=refusal.field, hint=f"{refusal.hint}; {_INSTALL}")
    model_type = config["model_type"]
    if model_type not in import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES:
        raise refusal
    if config.get("is_encoder_decoder"):
        raise UnsupportedArchitecture(_ENCODER_DECODER, field="is_encoder_decoder")
    names = config.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedArchitecture(f"{shown(names)} is not a list of class names", field="architectures")
    if sys.stderr.isatty():
        print(f"{model_type} is unknown to the planner: building it with transformers ...", file=sys.stderr)
    try:
        return _build(dict(config), model_type)
    except TonnageError:
        raise
    except Exception as error:  # transformers raises errors of any class for a config it cannot build
        said = " ".join(str(error).split())
        package = re.search(r"requires the (\S+) library", said)
        if isinstance(error, ImportError) and package:
            raise UnsupportedArchitecture(
                f"{model_type} has a part whose shapes are in the package {package[1]}, not in config.json",
                field="model_type",
                hint=f"pip install {package[1]}, or plan its text_config alone as a config.json of its own",
            ) from None
        why = f"{type(error).__name__}: {said}"[:160]
        raise UnsupportedArchitecture(
            f"transformers cannot build {model_type} from this config on the meta device ({why})",
            field="model_type",
        ) from None


def _build(config: dict[str, Any], model_type: str) -> Architecture:
    """Return the architecture of the model that transformers builds from ``config`` on the meta device."""
    import torch

    transformers: Any = import_module("transformers")
    auto = _auto_class(model_type, config["architectures"])
    for name in ("quantization_config", "auto_map", "model_type"):
        config.pop(name, None)
    _check_counts(config)
    loaded = transformers.AutoConfig.for_model(model_type, **config)
    if getattr(loaded, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(_ENCODER_DECODER, field="is_encoder_decoder")
    text = loaded.get_text_config()
    with torch.device("meta"):
        model = auto.from_config(loaded, dtype=torch.bfloat16, attn_implementation="eager")
    model.eval()
    # Parameters outside transformers' decoder module belong to vision or audio towers and to projectors.
    inside = "" if text is loaded else _path(model, model.get_decoder())
    tensors = _tensors(model, inside)
    layers = _cache_layers(model, loaded)
    hidden, heads = _field(text, "hidden_size"), _field(text, "num_attention_heads")
    wide = [t.shape[0] for t in tensors if t.role == "mlp" and len(t.shape) == 2]
    return Architecture(
        model_type=model_type,
        class_name=type(model).__name__,
        layers=_field(text, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=max(wide, default=hidden),
        heads=heads,
        kv_heads=layers[0].kv_heads,
        head_size=layers[0].head_size,
        vocab_size=_field(text, "vocab_size"),
        max_model_len=_field(text, "max_position_embeddings"),
        tensors=tensors,
        cache_layers=layers,
        rotary=_rotary(model.get_submodule(inside), text),
        position_field="max_position_embeddings",
        via="meta",
    )


def _auto_class(model_type: str, names: list[str]) -> Any:
    """Return the auto class (such as AutoModelForCausalLM) that builds the class named in ``architectures``."""
    modeling = import_module("transformers.models.auto.modeling_auto")
    known: dict[str, None] = {}
    for auto, mapping in _AUTO.items():
        filed = getattr(modeling, mapping).get(model_type, ())
        classes = (filed,) if isinstance(filed, str) else tuple(filed)
        if set(classes) & set(names):
            return getattr(modeling, auto)
        known.update(dict.fromkeys(classes))
    if not known:
        raise UnsupportedArchitecture(
            f"transformers has no model of {model_type} that generates text", field="model_type"
        )
    raise UnsupportedArchitecture(f"{shown(names)} is not {' or '.join(known)}", field="architectures")


def _path(model: Any, wanted: Any) -> str:
    """Return the dotted path of the module object ``wanted`` inside the PyTorch model ``model``."""
    return next(str(path) for path, module in model.named_modules() if module is wanted)


def _check_counts(config: Mapping[str, Any]) -> None:
    """Raise an error if the config has more layers or experts than the limit.

    Each layer and expert is a Python object even on the meta device, so a million would hang the process.
    """
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(value)
        counts = ("layer" in name or "expert" in name) and "size" not in name
        if counts and isinstance(value, int) and value > LIMITS["layers"]:
            raise UnsupportedArchitecture(
                f"{shown(value)} is more than the limit of {LIMITS['layers']:,}", field=name
            )


def _field(config: Any, name: str) -> int:
    """Return the attribute ``name`` of a transformers config, which must be a positive integer."""
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedArchitecture(f"{shown(value)} is not a positive integer", field=name)
    return value


def _tensors(model: Any, inside: str) -> tuple[TensorSpec, ...]:
    """Return the model's parameters and buffers in the modules' order; a shared parameter occurs once.

    ``inside`` is the module path of the language model. from_pretrained loads a tensor in fp32 if the model's
    class requests it, and in the tensor's own dtype if its module's constructor sets one (transformers 5.19,
    core_model_loading.py). All other tensors have the model's dtype, and their TensorSpec has the dtype None.
    """
    head = model.get_output_embeddings()
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    built = str(model.dtype)

    def kept(name: str, tensor: Any) -> str | None:
        if any(piece in name for piece in strict):
            return "float32"
        return None if str(tensor.dtype) == built else str(tensor.dtype).removeprefix("torch.")

    seen: dict[int, str] = {}
    out = []
    for path, module in model.named_modules():
        beside = module is not head and not f"{path}.".startswith(f"{inside}." if inside else "")
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}".lstrip(".")
            first = seen.setdefault(id(parameter), name)
            shape = tuple(parameter.shape)
            role = _tower(path) if beside else _role(path, module, shape, module is head)
            out.append(
                TensorSpec(
                    name, shape, role, type(module).__name__, None if beside else _layer(name),
                    tied_to=None if first == name else first, dtype=kept(name, parameter),
                )
            )  # fmt: skip
        for leaf, buffer in module.named_buffers(recurse=False):
            name = f"{path}.{leaf}".lstrip(".")
            dtype = kept(name, buffer)
            stored = None if leaf in module._non_persistent_buffers_set else dtype or "model"
            out.append(
                TensorSpec(
                    name, tuple(buffer.shape), "buffer", type(module).__name__,
                    None if beside else _layer(name), dtype=dtype, stored=stored,
                )
            )  # fmt: skip
    return tuple(out)


def _tower(path: str) -> Role:
    """Return the role (such as vision or projector) of a parameter outside the language model."""
    if re.search("vision|visual|image", path):
        return "vision"
    return "audio" if re.search("audio|speech|acoustic|semantic", path) else "projector"


def _role(path: str, module: Any, shape: tuple[int, ...], head: bool) -> Role:
    """Return the role (such as attention, mlp or norm) of a parameter of the language model."""
    kind, lower = type(module).__name__.lower(), path.lower()
    if head:
        return "head"
    if "embedding" in kind:
        return "embedding"
    if "norm" in kind:
        return "norm"
    if len(shape) == 3 and "expert" in lower + kind:
        return "expert"
    return "attention" if "attn" in lower or "attention" in lower else "mlp"


def _layer(name: str) -> int | None:
    """Return the layer index of a tensor: the first number in its name, None if there is none."""
    return next((int(piece) for piece in name.split(".") if piece.isdigit()), None)


def _cache_layers(model: Any, config: Any) -> tuple[CacheLayer, ...]:
    """Return one CacheLayer per layer, with the shapes of the cache that one forward pass fills.

    The keys and values of a layer must have the shape [1, heads, tokens, head size].
    """
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(
            input_ids=torch.zeros((1, _TOKENS), dtype=torch.long, device="meta"), past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
    out = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        shapes = [tuple(t.shape) if isinstance(t, torch.Tensor) else () for t in (keys, values)]
        window = getattr(layer, "sliding_window", None)
        kept = _TOKENS if window is None else min(_TOKENS, window)
        if type(layer).__name__ not in _PLAIN_LAYERS or any(
            len(shape) != 4 or shape[0] != 1 or shape[2] not in (_TOKENS, kept) for shape in shapes
        ):
            raise UnsupportedArchitecture(
                f"layer {index} caches {type(layer).__name__} {shapes}, not keys and values per token",
                field="model_type",
            )
        out.append(
            CacheLayer(
                index, "full" if window is None else "sliding", window, shapes[0][1], shapes[0][3],
                value_head_size=None if shapes[0][3] == shapes[1][3] else shapes[1][3],
            )
        )  # fmt: skip
    if not out:
        raise UnsupportedArchitecture(
            "a forward pass of transformers' model fills no KV cache", field="model_type"
        )
    return tuple(out)


def _rotary(model: Any, config: Any) -> Rotary | None:
    """Return the size of the rotary table that vLLM would keep: twice as wide as transformers' ``inv_freq``."""
    found = [buffer.shape[-1] for name, buffer in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    if not found:
        return None
    return Rotary(2 * found[0], 1, mrope="mrope_section" in (getattr(config, "rope_parameters", None) or {}))
