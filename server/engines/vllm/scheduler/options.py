"""Options of Tonnage's scheduler in vLLM, and where they are read from.

They are given by ``--additional-config '{"tonnage": {...}}'`` or ``TONNAGE_*`` environment variables. An option
has the same name as in ``tonnage serve``. A key of the config overrides the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.errors import CacheConfigError
from tonnage.planner.errors import DeploymentError, did_you_mean, nearest
from tonnage.planner.units import parse_seconds

# The default, mode auto, follows vLLM's own rule until a simulation shows that another rule has a higher
# throughput for the load (benchmarks/vllm_admission.py --matrix).
DEFAULT = AdmissionMode.AUTO
KEYS = ("admission_mode", "length_quantile", "watermark", "target_itl", "eviction", "keys")
# "lru" is vLLM's own eviction; "learned" is that of `tonnage.server.engines.vllm.eviction`.
EVICTION = ("lru", "learned")


class BadOption(ValueError):
    """An error for an unknown or invalid option in the additional config's `tonnage` or in the environment."""


def read_policy(additional: object, environment: Mapping[str, str] = os.environ) -> Policy:
    """Return the admission policy configured by `vllm_config.additional_config` and the environment.

    Raises:
        BadOption: a key or value is invalid; the message names it.
    """
    values, given = _read(additional, environment)
    try:
        # If no mode is set, length_quantile or watermark selects predictive mode, which was once the default.
        tuned = "length_quantile" in values or "watermark" in values
        return Policy(
            _mode(values.get("admission_mode", AdmissionMode.PREDICTIVE if tuned else DEFAULT)),
            _number(values, "length_quantile"),
            _number(values, "watermark"),
            target_itl=_seconds(values, "target_itl"),
            keys=_count(values, "keys"),
        )
    except CacheConfigError as error:
        raise BadOption(f"{_where(str(error.field), given)}: {error}") from None


def read_eviction(additional: object, environment: Mapping[str, str] = os.environ) -> str:
    """Return the configured way of evicting cached KV blocks, a member of EVICTION.

    Raises:
        BadOption: a key or value is invalid.
    """
    values, given = _read(additional, environment)
    wanted = values.get("eviction", EVICTION[0])
    if wanted not in EVICTION:
        raise BadOption(f"{_where('eviction', given)}: {wanted!r} is none of {', '.join(EVICTION)}")
    return str(wanted)


def _read(additional: object, environment: Mapping[str, str]) -> tuple[dict[str, Any], Mapping[Any, Any]]:
    """Return all configured options by name, and the options from vLLM's additional config alone."""
    given: object = additional.get("tonnage", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise BadOption(f'additional_config["tonnage"] is {given!r}, not an object with {", ".join(KEYS)}')
    unknown = [str(key) for key in given if key not in KEYS]
    if unknown:
        close = did_you_mean(unknown[0], KEYS)
        raise BadOption(
            f'additional_config["tonnage"]: unknown {", ".join(unknown)}; known: {", ".join(KEYS)}'
            + (f" ({close})" if close else "")
        )
    _check_names(environment)
    values: dict[str, Any] = {
        key: environment[_variable(key)] for key in KEYS if environment.get(_variable(key))
    }
    values.update(given)
    return values, given


def _check_names(environment: Mapping[str, str]) -> None:
    """Raise BadOption for an environment variable that looks like a misspelling of a scheduler option.

    Other TONNAGE_* names are ignored, because they may be for `tonnage serve`.
    """
    for variable in environment:
        name = variable.removeprefix("TONNAGE_").lower()
        if variable.startswith("TONNAGE_") and name not in KEYS and (close := nearest(name, KEYS)):
            raise BadOption(f"{variable} is no variable of Tonnage (did you mean {_variable(close)}?)")


def _mode(value: object) -> AdmissionMode:
    if not isinstance(value, str) or value not in list(AdmissionMode):
        raise CacheConfigError(f"{value!r} is none of {', '.join(AdmissionMode)}", field="admission_mode")
    return AdmissionMode(value)


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise CacheConfigError(f"{value!r} is not a number", field=key) from None


def _count(values: Mapping[str, Any], key: str) -> int:
    """Return the option `key` as a whole number of at least 1; the default is 1."""
    value = _number(values, key)
    if value is None:
        return 1
    if value != int(value) or value < 1:
        raise CacheConfigError(f"{values[key]!r} is not a whole number of at least 1", field=key)
    return int(value)


def _seconds(values: Mapping[str, Any], key: str) -> float | None:
    """Return the option `key` in seconds, from a number or a text with a unit ("100ms"); None if absent."""
    value = values.get(key)
    if not isinstance(value, str):
        return _number(values, key)
    try:
        return parse_seconds(value, key)
    except DeploymentError as error:
        raise CacheConfigError(f"{value!r} is not a time", field=key, hint=error.hint) from None


def _variable(key: str) -> str:
    return f"TONNAGE_{key.upper()}"


def _where(key: str, given: Mapping[Any, Any]) -> str:
    return f'additional_config["tonnage"]["{key}"]' if key in given else _variable(key)
