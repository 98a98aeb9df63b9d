"""Settings of a server, read from flags, ``TONNAGE_*`` environment variables, a TOML file or Python arguments.

Fields have the names of vLLM's flags where vLLM has one. Fields that are also flags of ``tonnage plan`` are
declared in ``tonnage.planner.deployment.Deployment``, and the others in ``tonnage.server.options.Options``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, ValidationInfo, create_model
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, did_you_mean, nearest
from tonnage.planner.flags import Flag, as_written, flags_of
from tonnage.planner.planning.deployment import deployment_of
from tonnage.server.engines.sharing import KVEventsConfig
from tonnage.server.options import PLANNED, Options
from tonnage.server.toml import read_toml

# When settings are shown, only the count of API keys is shown, never a key.
_Secrets = PlainSerializer(lambda keys: f"{len(keys)} given")
_KINDS: Mapping[str, Any] = {
    "int": int, "float": float, "bool": bool, "Path": Path, "tuple[str, ...]": tuple[str, ...],
    "KVEventsConfig": KVEventsConfig,
}  # fmt: skip
# type in the code of a pydantic error (bool_parsing, string_type ...) -> words for a value of this type
_WORDS = {"bool": "true or false", "string": "a name"}
_PREFIX = "TONNAGE_"
# Endings of TONNAGE_* environment variables that are not settings of the server. The variables are read by the
# caches, by the scheduler inside a plain vLLM (engines/vllm/scheduler/options.py), by vLLM's workers
# (figures.py), and by tests.
_OTHERS = ("CACHE", "EVICTION", "LENGTH_QUANTILE", "VLLM_FIGURES", "ORACLES", "SGLANG", "PICTURES", "PYODIDE")
# Kubernetes sets variables with these endings in every container for a Service named tonnage or tonnage-SUFFIX.
_SERVICE = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
# a value of TONNAGE_PORT that Kubernetes sets for a Service named tonnage, such as tcp://10.0.0.1:80
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def _setting(flag: Flag) -> tuple[Any, Any]:
    """Return the pydantic type and field of a setting from its flag, whose parser also checks the values."""

    def read(value: Any, info: ValidationInfo) -> Any:
        if flag.kind == "KVEventsConfig" and isinstance(value, dict):
            value = json.dumps(value)  # a TOML file may give kv_events_config as a table instead of JSON text
        if isinstance(value, str):
            return flag.read(value, info.field_name)
        if isinstance(value, list):
            value = tuple(value)
        flag.check(value, info.field_name)
        return value

    field = Field(flag.default, description=flag.help_line)
    kind = _KINDS.get(flag.kind, str)
    if flag.optional:
        kind = kind | None
    if flag.kind == "bool":  # the text of a bool is left to pydantic, which also accepts 1, yes and on
        return kind, field
    if flag.secret:
        return Annotated[kind, NoDecode, BeforeValidator(read), _Secrets], field
    return Annotated[kind, NoDecode, BeforeValidator(read)], field


if TYPE_CHECKING:

    class _Declared(Options, BaseSettings):
        """Placeholder for the type checker; at run time, create_model makes this class with all settings."""

else:
    _DECLARED = {name: flags_of(Deployment)[name] for name in PLANNED} | dict(flags_of(Options))
    _Declared = create_model(
        "_Declared", __base__=BaseSettings, __module__=__name__,
        **{name: _setting(flag) for name, flag in _DECLARED.items()},
    )  # fmt: skip


class Settings(_Declared):
    """The settings of one server: the flags of ``tonnage plan`` named in PLANNED, and the fields of Options.

    For a flag of ``tonnage plan``, None means the engine's own default. Sizes are int bytes.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="folder with config.json, .gguf file, hub id, or demo")

    # The contents of the TOML file; load_settings sets them while it creates one Settings object.
    _file: ClassVar[dict[str, Any]] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings, highest precedence first: arguments, environment, TOML file."""
        found = {
            name: value for name, value in env_settings().items()
            if name != "port" or _SERVICE_ADDRESS.match(value) is None
        }  # fmt: skip
        environment = InitSettingsSource(settings_cls, found)
        return init_settings, environment, InitSettingsSource(settings_cls, cls._file)

    @property
    def model_name(self) -> str:
        """The model's name in the API: clients send it, and /v1/models lists it."""
        return self.served_model_name or self.model

    def deployment(self) -> Deployment:
        """Return the planner's Deployment for these settings; the fake engine is planned like hf.

        Raises:
            DeploymentError: A flag is set that has no meaning without another flag.
        """
        given = {name: getattr(self, name) for name in PLANNED if name in self.model_fields_set}
        return deployment_of({"engine": "vllm" if self.backend == "vllm" else "hf", **given})


def load_settings(config: str | Path | None = None, **given: Any) -> Settings:
    """Load the settings from flags, the environment and a TOML file, highest precedence first.

    Args:
        config: The TOML file, or None.
        **given: The settings given as flags, by field name.

    Raises:
        DeploymentError: A field is invalid; the message has the field's name, its value and the valid values.
    """
    Settings._file = {} if config is None else read_config(Path(config))
    check_environment(os.environ)
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        if first["type"] == "missing":
            raise DeploymentError("is required", field=field, hint=f"or set {_PREFIX}{field.upper()}") from None
        if first["type"] == "extra_forbidden":
            close = did_you_mean(field, Settings.model_fields)
            raise DeploymentError("is not a setting", field=field, hint=close) from None
        shown = "it" if field == "api_key" else as_written(first["input"])
        why = _WORDS.get(first["type"].partition("_")[0], f"valid: {first['msg']}")
        raise DeploymentError(f"{shown} is not {why}", field=field) from None
    finally:
        Settings._file = {}


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file; names may use ``_`` or, like flags, ``-``.

    Raises:
        DeploymentError: The file cannot be read, is not TOML, or has an unknown name.
    """
    settings = {name.replace("-", "_"): value for name, value in read_toml(path, "config").items()}
    if unknown := settings.keys() - Settings.model_fields.keys():
        wrong = min(unknown)
        hint = did_you_mean(wrong, Settings.model_fields)
        raise DeploymentError(f"{path}: {wrong} is not a setting", field="config", hint=hint)
    return settings


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise an error for a misspelled ``TONNAGE_*`` variable in the environment.

    A misspelled name would otherwise go unnoticed and leave a limit unset or the server without API keys. An
    unknown name that resembles no setting is only reported on stderr.

    Raises:
        DeploymentError: A variable's name is close to the name of a setting.
    """
    known = {name.upper() for name in Settings.model_fields} | set(_OTHERS)
    for variable in sorted(environment):
        name = variable.upper().removeprefix(_PREFIX)
        if name == variable.upper() or name in known or _SERVICE.fullmatch(variable):
            continue
        if close := nearest(name, known):
            raise DeploymentError(
                "is not a variable of Tonnage", field=variable, hint=f"did you mean {_PREFIX}{close}?"
            )
        print(f"tonnage: {variable} is not a variable of Tonnage: ignored", file=sys.stderr)
