"""Checked access to config.json: each value has the right type and size, or an error names its field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture

# Maximum bytes of a config.json. The largest published file has 0.1 MiB, with its id2label table. ModelOpt's
# list of quantized modules would take 5 MiB for the largest model (every expert of Kimi-K2). Parsed JSON takes
# up to 24 times the size of its text (a list of empty lists), so a config of this size takes up to 250 MiB.
MAX_CONFIG_BYTES = 8 << 20
MAX_NESTING = 32  # maximum nesting; real configs nest three deep

# Limits far above any published model (Llama-3.1-405B: 126 layers, hidden 16,384; Gemma: vocabulary 262,208).
# A larger value means a broken file, and building a million TensorSpecs would hang the planner.
LIMITS = {"layers": 1_000, "width": 1 << 22, "heads": 1 << 14, "vocab": 1 << 24, "positions": 1 << 31}

# Words in the names of config fields that may change a shape or the KV cache. If the builder of
# the model family does not read such a field and its value is not neutral (None, 0, false), the model may
# differ from the plan, so the config is refused.
_SHAPE_WORDS = (
    "expert", "moe", "lora", "rank", "num_", "n_", "_size", "_dim", "layer", "head", "shared", "vision",
    "audio", "mamba", "ssm", "conv", "bias", "norm", "window", "sliding", "chunk", "cross", "encoder",
    "adapter", "memory", "altup", "index", "latent", "compress", "sink", "hyper", "mtp", "nextn", "block",
    "alibi", "parallel", "attention",
)  # fmt: skip
# Boolean fields with these words in their names only add a bias or a norm to existing matrices. Tables of
# relative positions are also called biases; _POSITION_WORDS excludes such fields.
_SWITCHED = {"bias", "norm"}
_POSITION_WORDS = ("pos", "rel")
_NEUTRAL = (None, False, 0, "", "none")


def load_config(path: Path) -> dict[str, Any]:
    """Read and check a config.json file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not a JSON object in UTF-8.
    """
    try:
        if not path.is_file():  # reading a pipe would block
            raise ConfigError("is not a regular file", field=str(path))
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{size:,} bytes is too large for a config.json", field=str(path))
        return parse_config(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from None


def parse_config(data: bytes, where: str) -> dict[str, Any]:
    """Parse and check the bytes of a config.json.

    Args:
        data: JSON in UTF-8.
        where: name of the file, for error messages.

    Raises:
        ConfigError: the text is not a JSON object, or has duplicate keys, NaN, Infinity or too deep nesting.
    """

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
    except ValueError as error:  # a number in the JSON has more digits than Python converts to int
        raise ConfigError(str(error).partition(";")[0], field=where) from None
    if not isinstance(config, dict):
        raise ConfigError(f"must be a JSON object, not {type(config).__name__}", field=where)
    _check_finite(config, ())
    return config


def _check_finite(value: object, path: tuple[str | int, ...]) -> None:
    """Raise ConfigError if a config value contains a number that is not finite, or is nested too deeply.

    Args:
        value: the value to check, including all nested values (at most `MAX_NESTING` levels).
        path: keys and indices that lead to `value`. They are joined to text only for an error message, because
            a malicious config may have a key of 1 MB, below which a million values are checked.
    """
    if len(path) > MAX_NESTING:
        raise ConfigError(f"nested more than {MAX_NESTING} deep", field=_written(path)[:80])
    # Infinity is valid in time_step_limit of published Mamba files, which is (0, Infinity) and affects no
    # shape.
    if isinstance(value, float) and not math.isfinite(value) and "time_step_limit" not in _written(path):
        raise ConfigError(f"{value} is not a finite number", field=_written(path))
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, float | list | dict):
            _check_finite(item, (*path, key))


def _written(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def shown(value: object) -> str:
    """Return a config value as text, cut to 60 characters, for error messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_BASIC_SIZES = frozenset(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
     "max_position_embeddings")
)  # fmt: skip


class Fields:
    """Checked access to the fields of a config.json, with a record of the fields that were read.

    `check_unread` then finds the fields that the builder of the model family did not read.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
        absent: Mapping[str, Any] | None = None,
        sizes: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Create checked access to the fields of one config.

        Args:
            config: the parsed config.json.
            aliases: standard field name -> name in config files of the model family.
            absent: field -> default value if config.json leaves the field out.
            sizes: function that returns the default sizes of the config class, for fields that neither
                config.json nor `absent` has. It is called only if such a field is read.
        """
        self.config = config
        self._aliases = dict(aliases or {})
        self._absent = absent or {}
        self._sizes = sizes
        self._read: set[str] = set()
        self.assumed: dict[str, int] = {}

    def name(self, field: str) -> str:
        """Return the name that a field has in this config.json: the model family's own or the standard name.

        Raises:
            ConfigError: the file has the field under both names, with different values.
        """
        other = self._aliases.get(field)
        if other is None:
            return field
        if field in self.config and other in self.config and self.config[field] != self.config[other]:
            raise ConfigError(
                f"{shown(self.config[field])} contradicts {other} = {shown(self.config[other])}", field=field
            )
        return field if field in self.config and other not in self.config else other

    def raw(self, field: str) -> Any:
        """Return the unchecked value of a config field, or None if it is absent; mark the field as read."""
        name = self.name(field)
        self._read.update((field, name))
        if name in self.config:
            return self.config[name]
        value = self._absent.get(field)
        if value is None and field in _BASIC_SIZES and field in self._sizes():
            value = self.assumed[field] = self._sizes()[field]
        return value

    def ignore(self, *fields: str) -> None:
        """Mark config fields as read, because they change neither tensor shapes nor the KV cache."""
        self._read.update(fields)

    def integer(self, field: str, default: int | None = None, *, limit: str, minimum: int = 1) -> int:
        """Return an integer field of the config.

        Args:
            field: name of the field.
            default: value where the field is absent or null.
            limit: key of the upper bound in the dict LIMITS.
            minimum: the lower bound.

        Raises:
            ConfigError: the field is missing, no integer or out of range.
        """
        value = self.optional_integer(field, default, limit=limit, minimum=minimum)
        if value is None:
            raise ConfigError("missing", field=self.name(field), hint="an integer is needed")
        return value

    def optional_integer(
        self, field: str, default: int | None = None, *, limit: str, minimum: int = 1
    ) -> int | None:
        """Return an integer field of the config, or `default` if it is absent or null.

        Args:
            field: name of the field.
            default: value where the field is absent or null.
            limit: key of the upper bound in the dict LIMITS.
            minimum: the lower bound.

        Raises:
            ConfigError: the value is no integer or out of range.
        """
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
        """Return a boolean field of the config; an absent field is `default`, null is False.

        Raises:
            ConfigError: the value is not a boolean.
        """
        value = self.raw(field)
        if value is None:
            return default and self.name(field) not in self.config  # null in config.json counts as False
        if not isinstance(value, bool):
            raise ConfigError(f"{shown(value)} is not true or false", field=self.name(field))
        return value

    def number(self, field: str, default: float) -> float:
        """Return a config field as a float, or `default` if it is absent.

        Raises:
            ConfigError: the value is not a number.
        """
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
        """Return a tensor width: the number in the config field `field` times `of`, rounded down.

        Raises:
            ConfigError: the width is out of range.
        """
        width = of * self.number(field, default)
        if not 1 <= width <= LIMITS["width"]:
            raise ConfigError(
                f"{shown(self.raw(field))} times {of} is not between 1 and {LIMITS['width']}",
                field=self.name(field),
            )
        return int(width)

    def mapping(self, field: str) -> dict[str, Any] | None:
        """Return a config field that is a JSON object, or None where it is absent.

        Raises:
            ConfigError: the value is not an object.
        """
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{shown(value)} is not an object", field=self.name(field))
        return value

    def layer_types(self, layers: int) -> tuple[str, ...] | None:
        """Return each layer's kind (full_attention or sliding_attention) from the config field `layer_types`.

        Returns None if the field is absent.

        Raises:
            ConfigError: the list has not one entry per layer.
            UnsupportedArchitecture: an entry is another kind of attention.
        """
        value = self.raw("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            raise ConfigError(
                f"{shown(value)} is not a list with an entry for each of the {layers} layers",
                field="layer_types",
            )
        for kind in value:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedArchitecture(
                    f"{shown(kind)} is not a known kind of layer", field="layer_types"
                )
        return tuple(value)

    def listed(self, field: str, layers: int, words: Mapping[Any, bool]) -> tuple[bool, ...] | None:
        """Return one boolean per layer from a config field that lists one word per layer.

        Returns None if the field is absent.

        Args:
            field: name of the field.
            layers: number of layers.
            words: valid word -> its boolean value.

        Raises:
            ConfigError: the list has another length or other words.
        """
        value = self.raw(field)
        if value is None:
            return None
        known = isinstance(value, list) and all(isinstance(word, str | int) and word in words for word in value)
        if not known or len(value) != layers:
            named = " or ".join(map(str, words))
            raise ConfigError(
                f"{shown(value)} does not list {named} for each of {layers} layers", field=self.name(field)
            )
        return tuple(words[word] for word in value)

    def check_unread(
        self, model_type: str, harmless: Mapping[str, tuple[object, ...] | str]
    ) -> tuple[str, ...]:
        """Return the names of true boolean config fields that were not read and can add only biases and norms.

        planning/weights.py computes an upper bound of the bytes that these fields may add.

        Args:
            model_type: the model type, for error messages.
            harmless: field -> values for which the field has no effect (Family.leftovers).

        Raises:
            UnsupportedArchitecture: the name of another unread field suggests that it changes a shape or the KV
                cache.
        """
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


# Fields about routing, scaling, rotation and training. They change computed values, but no stored tensor.
# Sources: the published files of tests/data/configs and the config classes of transformers 5.19.
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

# Fields of transformers' PreTrainedConfig (transformers 5.19, configuration_utils.py), and unused fields that
# are common in published files. No shape and no KV cache depends on them.
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


def label_count(fields: Fields) -> int:
    """Return the number of labels of a classifier, from its config.

    The number is the length of ``id2label``, else ``num_labels``, else 2 (PreTrainedConfig, transformers 5.19).
    """
    listed = fields.raw("id2label")
    if isinstance(listed, dict) and listed:
        return len(listed)
    return fields.integer("num_labels", 2, limit="vocab")
