"""Settings: one model for flags, ``TONNAGE_*`` environment variables and code.

Field names are vLLM's flags where vLLM has one; those that the plan is made of are declared in
:class:`tonnage.planner.plans.Deployment`. ``tonnage serve`` makes its command line from this class.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, ValidationInfo, create_model
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import flags_of
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.plans import Deployment
from tonnage.planner.units import parse_size
from tonnage.server.engines.sharing import KVEventsConfig, events_config


def _size(value: Any, info: ValidationInfo) -> Any:
    """``512MiB``, ``2GB`` or plain bytes, as on the planner's command line."""
    return parse_size(value, info.field_name or "size") if isinstance(value, str) else value


def _words(value: Any) -> Any:
    """``a,b`` from the environment or a flag; a list from code or a file."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _events(value: Any) -> Any:
    """The flag's JSON; a table from the file."""
    if isinstance(value, dict):
        value = json.dumps(value)
    return events_config(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_size), Field(ge=1)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
# Printed as their number only.
Secrets = Annotated[Words, PlainSerializer(lambda keys: f"{len(keys)} given")]


# Flags of tonnage plan that the engines are started with (engines/vllm/engine.py engine_arguments; the hf
# engine takes the plan itself). The other flags plan for what no engine here does.
PLANNED = (
    "device", "gpu", "device_memory", "gpu_memory_utilization", "dtype", "quantization", "kv_cache_dtype",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes",
    "enable_prefix_caching", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "enable_expert_parallel", "runner", "enable_lora", "max_loras", "max_lora_rank", "enforce_eager",
)  # fmt: skip


def _planned(name: str) -> tuple[Any, Any]:
    """Type and field of a setting that is a flag of tonnage plan; read and checked as it is there."""
    flag = flags_of(Deployment)[name]

    def read(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return flag.read(value, info.field_name)
        flag.check(value, info.field_name)
        return value

    field = Field(flag.default, description=flag.said)
    if flag.kind == "bool":
        return (bool | None if flag.optional else bool), field
    kind: Any = {"int": int, "float": float}.get(flag.kind, str)
    return Annotated[kind | None if flag.optional else kind, BeforeValidator(read)], field


if TYPE_CHECKING:
    _Planned = BaseSettings  # in the code these settings are read from the Deployment
else:
    _Planned = create_model(
        "_Planned", __base__=BaseSettings, __module__=__name__, **{name: _planned(name) for name in PLANNED}
    )


class Settings(_Planned):
    """What one server is started with: the flags PLANNED, whose None means as the engine chooses, and these.
    Bytes are ints."""

    model_config = SettingsConfigDict(env_prefix="TONNAGE_", extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="folder with config.json, .gguf file, hub id, or demo")
    served_model_name: str | None = Field(None, min_length=1, description="name in the API; default: MODEL")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    backend: Literal["auto", "hf", "vllm", "fake"] = Field(
        "hf", description="engine; auto: vllm where it runs the model, else hf; fake runs no model"
    )
    lora_modules: Words = Field(
        (), description="name=folder, comma-separated: adapters in PEFT's format, asked for by model: name"
    )

    admission_mode: Literal["guaranteed", "predictive", "greedy", "no_evict"] = Field(
        "guaranteed",
        description="guaranteed: nothing admitted is ever preempted; predictive: by learned output lengths; "
        "greedy: vLLM's rule; no_evict: all reservations fit",
    )
    watermark: float | None = Field(
        None, ge=0, lt=1, description="share of the pool admission leaves free (default: the mode's own)"
    )

    kv_events_config: Annotated[KVEventsConfig | None, NoDecode, BeforeValidator(_events)] = Field(
        None, description="publish KV events over ZeroMQ: JSON with vLLM's fields, enable_kv_cache_events"
    )
    shared_system_prompt: Words = Field(
        (), description="text files, comma-separated: system prompts whose blocks all tenants share"
    )

    # As vLLM counts it: unfinished requests, waiting and running, n sequences count n. vLLM's default is
    # no limit; 512 is Ollama's queue (OLLAMA_MAX_QUEUE).
    max_num_queued_reqs: int = Field(512, ge=1, description="unfinished sequences before 503")
    # 16 is OpenAI's default for /v1/completions (its API reference, "max_tokens").
    default_max_tokens: int = Field(16, ge=1, description="max_tokens of a request without one")
    default_chat_max_tokens: int = Field(
        1024, ge=1, description="max_completion_tokens of a chat request without one, at most"
    )
    chat_template: Path | None = Field(None, description="Jinja file (default: the model's own template)")
    enable_auto_tool_choice: bool = Field(
        False, description="let the model decide to call a tool (vLLM's parsers: 500 MiB in the API process)"
    )
    tool_call_parser: str | None = Field(
        None, description="parser of the model's tool calls, by vLLM's name: hermes, llama3_json, ..."
    )
    lenient: bool = Field(False, description="ignore unknown request fields and list them in x-ignored-fields")

    metrics_compat: Literal["none", "vllm"] = Field(
        "none", description="vllm: also export vLLM's names on /metrics, for gateways and autoscalers"
    )
    # A million token ids as JSON, more than any context served here, are under 8 MiB.
    max_request_body_bytes: Bytes = Field(8 * 2**20, description="largest accepted request body")

    body_timeout: float = Field(30.0, gt=0, description="seconds a client has to send its body")
    request_timeout: float | None = Field(None, gt=0, description="seconds until a request is given up")
    sse_keep_alive: float = Field(15.0, gt=0, description="seconds of silence before a stream's comment")
    drain_seconds: float = Field(30.0, ge=0, description="seconds a stopping server gives running requests")

    api_key: Secrets = Field((), description="keys, comma-separated; each is a tenant (default: open to all)")
    api_key_file: Path | None = Field(None, description="TOML file of keys with quotas")
    metrics_public: bool = Field(False, description="serve /metrics without a key")
    allowed_origins: Words = Field((), description="CORS origins, comma-separated (default: none)")
    ssl_certfile: Path | None = Field(None, description="TLS certificate chain (PEM)")
    ssl_keyfile: Path | None = Field(None, description="TLS private key (PEM)")

    # vLLM gives its own engine core 600 (VLLM_ENGINE_READY_TIMEOUT_S): too short for a large model from a slow
    # disk. As long as the chart's startup probe waits (startup.maxSeconds).
    engine_ready_timeout: float = Field(
        1800.0, gt=0, description="seconds an engine has to load, at each start and restart"
    )
    max_engine_restarts: int = Field(10, ge=0, description="restarts of a dead engine in an hour; 0: none")
    log_format: Literal["text", "json"] = Field("text", description="form of the log lines on stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    access_log: bool = Field(False, description="log a line for each request, without its text")
    request_log: Path | None = Field(None, description="file for the requests' sizes, for tonnage replay")

    otlp_traces_endpoint: str | None = Field(
        None, pattern="^https?://", description="OTLP over HTTP: where spans of the requests are sent"
    )

    # Set by load_settings for one construction: the tables of the TOML file.
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
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls._file)

    @property
    def model_name(self) -> str:
        """The name clients send and /v1/models lists."""
        return self.served_model_name or self.model

    def deployment(self) -> Deployment:
        """The planner's half of the settings. The fake engine is planned like hf.

        Raises DeploymentError for a flag that means nothing without another one.
        """
        given = {name: getattr(self, name) for name in PLANNED if name in self.model_fields_set}
        return deployment_of({"engine": "vllm" if self.backend == "vllm" else "hf", **given})


# Settings of the API alone: a command that only loads a model has no use for them.
API_SETTINGS = (
    "served_model_name", "host", "port", "max_num_queued_reqs", "default_max_tokens", "default_chat_max_tokens",
    "lenient", "max_request_body_bytes", "body_timeout", "request_timeout", "sse_keep_alive", "drain_seconds",
    "api_key", "api_key_file", "metrics_public", "allowed_origins", "ssl_certfile", "ssl_keyfile",
    "engine_ready_timeout", "max_engine_restarts", "log_format", "log_level", "access_log", "request_log",
    "metrics_compat", "otlp_traces_endpoint", "kv_events_config", "shared_system_prompt", "chat_template",
    "enable_auto_tool_choice", "tool_call_parser",
)  # fmt: skip


def load_settings(config: str | Path | None = None, **given: Any) -> Settings:
    """Settings from ``given`` (flags, which win), the environment and the TOML file ``config``.

    Raises DeploymentError naming the first bad field, its value and what would be right.
    """
    Settings._file = {} if config is None else read_config(Path(config))
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        if first["type"] == "missing":
            raise DeploymentError("is required", field=field, hint=f"or set TONNAGE_{field.upper()}") from None
        if first["type"] == "extra_forbidden":
            raise DeploymentError("is not a setting", field=field) from None
        shown = "" if field == "api_key" else f", not {str(first['input'])[:100]!r}"
        raise DeploymentError(f"{first['msg']}{shown}", field=field) from None
    finally:
        Settings._file = {}


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a TOML file; a name may be written as the flag. Raises DeploymentError."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise DeploymentError(f"cannot read {path}: {error.strerror}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeploymentError(f"{path} is not TOML: {error}", field="config") from None
    settings = {name.replace("-", "_"): value for name, value in document.items()}
    if unknown := settings.keys() - Settings.model_fields.keys():
        raise DeploymentError(f"{path}: {min(unknown)} is not a setting", field="config")
    return settings
