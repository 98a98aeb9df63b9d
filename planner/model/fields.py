"""Checked reading of config.json: each value is of the right type and size, or an error names its field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture

# The largest real config.json seen is 0.1 MiB (id2label tables included); the list of quantized modules of
# the largest model (ModelOpt, Kimi-K2's experts one by one) would be 5. As Python objects JSON takes up to 24
# times its text (a list of empty lists), a plan of a file as large as this up to 250 MiB.
MAX_CONFIG_BYTES = 8 << 20
MAX_NESTING = 32  # real configs nest three deep

# Limits far above any published model (Llama-3.1-405B: 126 layers, hidden 16,384; Gemma: vocabulary 262,208).
# Beyond them the value is a broken file, and building a million TensorSpecs would hang the planner.
LIMITS = {"layers": 1_000, "width": 1 << 22, "heads": 1 << 14, "vocab": 1 << 24, "positions": 1 << 31}

# Words of field names that mean a shape or a cache rule. A field with such a name that no adapter read
# and whose value is not neutral changes the model in a way the planner does not know.
_SHAPE_WORDS = (
    "expert", "moe", "lora", "rank", "num_", "n_", "_size", "_dim", "layer", "head", "shared", "vision",
    "audio", "mamba", "ssm", "conv", "bias", "norm", "window", "sliding", "chunk", "cross", "encoder",
    "adapter", "memory", "altup", "index", "latent", "compress", "sink", "hyper", "mtp", "nextn", "block",
    "alibi", "parallel", "attention",
)  # fmt: skip
# A switch of this kind has no size of its own: it adds a bias or a norm to matrices that are there. Tables of
# relative positions are also called biases.
_SWITCHED = {"bias", "norm"}
_POSITION_WORDS = ("pos", "rel")
_NEUTRAL = (None, False, 0, "", "none")


def load_config(path: Path) -> dict[str, Any]:
    """Read config.json. Raises ConfigError naming what is broken (not UTF-8, not JSON, not an object...)."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ConfigError("is not a regular file", field=str(path))
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{size:,} bytes is no config.json", field=str(path))
        return parse_config(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from None


def parse_config(data: bytes, where: str) -> dict[str, Any]:
    """JSON text -> dict; refuses duplicate keys, NaN, Infinity and absurd nesting by name."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out and out[key] != value:
                raise ConfigError(
                    f"given twice with different values: {shown(out[key])} and {shown(value)}", field=key
                )
            out[key] = value
        return out

    try:
        config = json.loads(data.decode("utf-8-sig"), object_pairs_hook=no_duplicates)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}", field=where) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"not JSON: {error.msg} at line {error.lineno} column {error.colno}", field=where
        ) from None
    except RecursionError:
        raise ConfigError("nested too deeply", field=where) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError(str(error).partition(";")[0], field=where) from None
    if not isinstance(config, dict):
        raise ConfigError(f"must be a JSON object, not {type(config).__name__}", field=where)
    _check_finite(config, ())
    return config


def _check_finite(value: object, path: tuple[str | int, ...]) -> None:
    """``path``: keys and indices that lead to ``value``; written out where it is needed alone, because a key
    may be a megabyte and hold a million items."""
    if len(path) > MAX_NESTING:
        raise ConfigError(f"nested more than {MAX_NESTING} deep", field=_written(path)[:80])
    # Mamba's limits on the time step: (0, Infinity) in published files, and no shape
    if isinstance(value, float) and not math.isfinite(value) and "time_step_limit" not in _written(path):
        raise ConfigError(f"{value} is not a finite number", field=_written(path))
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, float | list | dict):
            _check_finite(item, (*path, key))


def _written(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """One family's view of a config. Remembers what was read, so that ``check_unread`` can tell
    which fields nobody understood. ``aliases`` maps a standard name to the name the family's files use;
    ``absent`` has the values of fields that the file leaves out."""

    def __init__(
        self,
        config: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
        absent: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._aliases = dict(aliases or {})
        self._absent = absent or {}
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """The spelling the file uses (both spellings with different values contradict each other)."""
        other = self._aliases.get(field)
        if other is None:
            return field
        if field in self.config and other in self.config and self.config[field] != self.config[other]:
            raise ConfigError(
                f"{shown(self.config[field])} contradicts {other} = {shown(self.config[other])}", field=field
            )
        return field if field in self.config and other not in self.config else other

    def raw(self, field: str) -> Any:
        name = self.name(field)
        self._read.update((field, name))
        return self.config[name] if name in self.config else self._absent.get(field)

    def ignore(self, *fields: str) -> None:
        """Fields known to change neither shapes nor the cache."""
        self._read.update(fields)

    def integer(self, field: str, default: int | None = None, *, limit: str, minimum: int = 1) -> int:
        value = self.optional_integer(field, default, limit=limit, minimum=minimum)
        if value is None:
            raise ConfigError("missing", field=self.name(field), hint="an integer is needed")
        return value

    def optional_integer(
        self, field: str, default: int | None = None, *, limit: str, minimum: int = 1
    ) -> int | None:
        value = self.raw(field)
        if value is None:
            return default
        name = self.name(field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{shown(value)} is not an integer", field=name)
        if not minimum <= value <= LIMITS[limit]:
            raise ConfigError(f"{shown(value)} is not between {minimum} and {LIMITS[limit]}", field=name)
        return value

    def boolean(self, field: str, default: bool) -> bool:
        value = self.raw(field)
        if value is None:
            return default and self.name(field) not in self.config  # null is no
        if not isinstance(value, bool):
            raise ConfigError(f"{shown(value)} is not true or false", field=self.name(field))
        return value

    def number(self, field: str, default: float) -> float:
        value = self.raw(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{shown(value)} is not a number", field=self.name(field))
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{shown(value)} is too large a number", field=self.name(field)) from None

    def share(self, field: str, default: float, of: int) -> int:
        """A width that is the number ``field`` times ``of``, rounded down."""
        width = of * self.number(field, default)
        if not 1 <= width <= LIMITS["width"]:
            raise ConfigError(
                f"{shown(self.raw(field))} times {of} is not between 1 and {LIMITS['width']}",
                field=self.name(field),
            )
        return int(width)

    def mapping(self, field: str) -> dict[str, Any] | None:
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{shown(value)} is not an object", field=self.name(field))
        return value

    def layer_types(self, layers: int) -> tuple[str, ...] | None:
        """``layer_types``: one of full_attention | sliding_attention per layer, or None when absent."""
        value = self.raw("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            raise ConfigError(
                f"{shown(value)} does not name the {layers} layers of num_hidden_layers", field="layer_types"
            )
        for kind in value:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedArchitecture(f"{shown(kind)} is not known here", field="layer_types")
        return tuple(value)

    def listed(self, field: str, layers: int, words: Mapping[Any, bool]) -> tuple[bool, ...] | None:
        """A list of one of ``words`` per layer as what the words mean, or None when absent."""
        value = self.raw(field)
        if value is None:
            return None
        known = isinstance(value, list) and all(isinstance(word, str | int) and word in words for word in value)
        if not known or len(value) != layers:
            named = " or ".join(map(str, words))
            raise ConfigError(f"{shown(value)} does not name {layers} layers {named}", field=self.name(field))
        return tuple(words[word] for word in value)

    def check_unread(
        self, model_type: str, harmless: Mapping[str, tuple[object, ...] | str]
    ) -> tuple[str, ...]:
        """Names of unread switches that can add no more than biases and norms (planning/weights.py bounds it).
        ``harmless``: fields known to change nothing, with their values (Family.leftovers).

        Raises UnsupportedArchitecture for any other field that sounds like a shape and that nobody read."""
        known = self._read | _PRETRAINED_FIELDS | _COMPUTE_FIELDS
        bounded = []
        for field, value in self.config.items():
            if field in known or field.startswith("_") or _is_neutral(value):
                continue
            words = {word for word in _SHAPE_WORDS if word in field}
            if not words or (field in harmless and self._allows(harmless[field], value)):
                continue
            if value is True and words <= _SWITCHED and not any(word in field for word in _POSITION_WORDS):
                bounded.append(field)
                continue
            raise UnsupportedArchitecture(
                f"{shown(value)}: {model_type} models are not known to have this field, "
                "and it may change the memory",
                field=field,
                hint="remove the field from config.json if it is a leftover",
            )
        return tuple(bounded)

    def _allows(self, values: tuple[object, ...] | str, value: object) -> bool:
        if isinstance(values, str):
            return values in self.config and value == self.config[values]
        return not values or any(type(value) is type(other) and value == other for other in values)


def _is_neutral(value: object) -> bool:
    return not value if isinstance(value, list | dict) else value in _NEUTRAL


# Routing, scaling, rotation and training: they change what is computed, not what is stored. From the published
# files of tests/data/configs and the config classes of transformers 5.19.
_COMPUTE_FIELDS = frozenset(
    """
    attention_multiplier attn_logit_softcapping attn_scale attn_temperature_tuning aux_loss_alpha aux_loss_coef
    embedding_multiplier eod_token_id ep_size final_logit_softcapping floor_scale input_jitter_noise
    lambda_std_dev logits_scaling moe_layer_freq_dtype moe_routed_scaling_factor moe_router_dtype norm_eps
    norm_epsilon norm_topk_prob num_experts_per_tok output_router_logits qk_head_dim residual_dropout
    residual_multiplier rope_interleave rotary_pct routed_scaling_factor router_aux_loss_coef
    router_jitter_noise scale_depth scale_emb scoring_func seq_aux sep_token_id swiglu_limit topk_method
    embedding_dropout partial_rotary_factor layernorm_epsilon n_group topk_group use_mrope
    """.split()  # noqa: SIM905
)

# Fields of transformers' PreTrainedConfig and common leftovers in published files (transformers 5.19,
# configuration_utils.py): none changes a shape or the KV cache.
_PRETRAINED_FIELDS = frozenset(
    """
    architectures attention_dropout attention_probs_dropout_prob attention_softmax_in_fp32 attn_dropout_prob
    attn_implementation attn_pdrop auto_map bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size dtype embd_pdrop encoder_no_repeat_ngram_size eos_token_id finetuning_task
    forced_bos_token_id gradient_checkpointing hidden_act hidden_activation hidden_dropout
    hidden_dropout_prob id2label initializer_range label2id layer_norm_eps layer_norm_epsilon max_length
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states pad_token_id pretraining_tp problem_type quantization_config
    resid_pdrop return_dict rms_norm_eps scale_attention_softmax_in_fp32 scale_attn_weights
    task_specific_params tie_word_embeddings torch_dtype transformers_version unk_token_id unsloth_version
    use_cache use_return_dict
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
    exponential_decay_length_penalty forced_eos_token_id is_decoder length_penalty output_scores prefix
    pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id
    suppress_tokens temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    typical_p use_bfloat16 add_cross_attention
    """.split()  # noqa: SIM905
)
