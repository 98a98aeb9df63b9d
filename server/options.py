"""``Options``: the settings of a server that are not flags of ``tonnage plan``.

Each option is declared once, in this module. ``tonnage serve --help``, the environment variables ``TONNAGE_*``,
the keys of ``--config`` and ``tonnage.server.settings.Settings`` are generated from these declarations
(``tonnage.planner.flags``). The module imports no server library, so that help and shell completion start
quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import flag
from tonnage.planner.units import parse_seconds

if TYPE_CHECKING:
    from tonnage.server.engines.sharing import KVEventsConfig

# Flags of `tonnage plan` that an engine is started with (engine_arguments in engines/vllm/engine.py; the hf
# engine gets the plan object). No backend implements the features of the other flags.
PLANNED = (
    "device", "gpu", "device_memory", "gpu_memory_utilization", "dtype", "quantization", "kv_cache_dtype",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes",
    "enable_prefix_caching", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "enable_expert_parallel", "runner", "enable_lora", "max_loras", "max_lora_rank", "enforce_eager",
    "kv_offloading_bytes", "kv_offloading_disk", "kv_offloading_policy",
)  # fmt: skip

LogFormat = Literal["text", "json"]

_ENGINE, _ADMISSION, _API, _CHAT = "backend", "admission and shared prefixes", "API", "chat"
_LIMITS, _SECURITY, _LOGS = "limits and times", "keys and TLS", "logs, metrics and traces"


def _events(text: str, field: str) -> KVEventsConfig | None:
    from tonnage.server.engines.sharing import events_config  # imported here, because --help does not need it

    try:
        return events_config(text)
    except ValueError as error:
        raise DeploymentError(str(error), field=field) from None


def _endpoint(text: str, field: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise DeploymentError(f"{text[:100]!r} is not an http:// or https:// address", field=field)
    return text


@dataclass(slots=True)
class Options:
    """Settings of a server without the flags of ``tonnage plan``; sizes are int bytes, times float seconds."""

    backend: str = flag(
        "hf", "engine; auto: vllm where it can run the model, else hf; fake: runs no model", group=_ENGINE,
        choices=("auto", "hf", "vllm", "fake"),
    )  # fmt: skip
    lora_modules: tuple[str, ...] = flag(
        (), "adapters in PEFT's format, selected by model: NAME", group=_ENGINE, metavar="NAME=FOLDER,..."
    )
    # vLLM waits at most 600 s for its own engine core (VLLM_ENGINE_READY_TIMEOUT_S), which is too short for a
    # large model on a slow disk. Tonnage's default, 1800 s, is also that of the Helm chart's startup probe
    # (startup.maxSeconds).
    engine_ready_timeout: float = flag(
        1800.0, "time an engine has to load, at each start and restart", group=_ENGINE, unit="seconds"
    )
    max_engine_restarts: int = flag(10, "restarts of a dead engine per hour; 0: none", group=_ENGINE, least=0)

    admission_mode: str = flag(
        "guaranteed", "guaranteed: nothing admitted is ever preempted; predictive: by learned output lengths; "
        "greedy: vLLM's rule; no_evict: all reservations fit; auto: vLLM's rule, or holding requests back when "
        "measured step costs show that this serves the load better", group=_ADMISSION,
        choices=("guaranteed", "predictive", "greedy", "no_evict", "auto"),
    )  # fmt: skip
    target_itl: float | None = flag(
        None, "with --admission-mode auto: upper bound of the P99 time between tokens, at the price of "
        "throughput (for example 100ms)", group=_ADMISSION, metavar="TIME", read=parse_seconds,
    )  # fmt: skip
    watermark: float | None = flag(
        None, "share of the pool that admission leaves free (default: the mode's own)", group=_ADMISSION,
        unit="share", least=0,
    )  # fmt: skip
    kv_events_config: KVEventsConfig | None = flag(
        None, "publish KV events over ZeroMQ: vLLM's fields, with enable_kv_cache_events", group=_ADMISSION,
        metavar="JSON", read=_events,
    )  # fmt: skip
    shared_system_prompt: tuple[str, ...] = flag(
        (), "text files of system prompts whose blocks all tenants share", group=_ADMISSION, metavar="FILE,..."
    )

    served_model_name: str | None = flag(None, "name of the model in the API (default: MODEL)", group=_API)
    host: str = flag("127.0.0.1", "address to listen on", group=_API)
    port: int = flag(8000, "port to listen on; 0 takes a free one", group=_API, least=0, most=65_535)
    allowed_origins: tuple[str, ...] = flag((), "CORS origins (default: none)", group=_API, metavar="URL,...")
    lenient: bool = flag(False, "ignore unknown request fields and list them in x-ignored-fields", group=_API)

    chat_template: Path | None = flag(
        None, "Jinja template, or a shipped one that shows tools: hermes, llama3_json or mistral (default: the "
        "model's own)", group=_CHAT, metavar="FILE",
    )  # fmt: skip
    enable_auto_tool_choice: bool = flag(
        False, "let the model decide to call a tool (vLLM's parsers: 500 MiB in the API process)", group=_CHAT
    )
    tool_call_parser: str | None = flag(
        None, "reader of tool calls, by vLLM's name: hermes, llama3_json, ...", group=_CHAT
    )
    reasoning_parser: str | None = flag(
        None, "reader of reasoning (reasoning_content), by vLLM's name: deepseek_r1, qwen3, ...", group=_CHAT
    )

    # As in vLLM, max_num_queued_reqs limits unfinished sequences, waiting and running; a request has n of them.
    # vLLM has no limit by default; 512 is the queue of Ollama (OLLAMA_MAX_QUEUE).
    max_num_queued_reqs: int = flag(512, "unfinished sequences before new ones get 503", group=_LIMITS)
    # 16 is OpenAI's default for /v1/completions (API reference, "max_tokens").
    default_max_tokens: int = flag(16, "max_tokens of a request without one", group=_LIMITS)
    default_chat_max_tokens: int = flag(
        1024, "upper bound of max_completion_tokens for a chat request without one", group=_LIMITS
    )
    # The default of max_request_body_bytes suffices for the JSON of a million token ids. No model served here
    # has a context of that many tokens.
    max_request_body_bytes: int = flag(8 * 2**20, "largest accepted request body", group=_LIMITS, unit="bytes")
    body_timeout: float = flag(30.0, "time a client has to send its body", group=_LIMITS, unit="seconds")
    request_timeout: float | None = flag(
        None, "time after which a request is given up (default: never)", group=_LIMITS, unit="seconds"
    )
    sse_keep_alive: float = flag(15.0, "silence before a stream comment", group=_LIMITS, unit="seconds")
    drain_seconds: float = flag(
        30.0, "time that a stopping server gives running requests", group=_LIMITS, unit="seconds", least=0
    )

    api_key: tuple[str, ...] = flag(
        (), "keys, each a tenant (default: open to all)", group=_SECURITY, metavar="KEY,...", secret=True
    )
    api_key_file: Path | None = flag(None, "TOML file of keys with quotas", group=_SECURITY, metavar="FILE")
    allowed_hosts: tuple[str, ...] = flag(
        (), "names that the header Host may have (default: any; without keys on loopback only loopback's)",
        group=_SECURITY, metavar="NAME,...",
    )  # fmt: skip
    metrics_public: bool = flag(False, "serve /metrics without a key", group=_SECURITY)
    ssl_certfile: Path | None = flag(None, "TLS certificate chain (PEM)", group=_SECURITY, metavar="FILE")
    ssl_keyfile: Path | None = flag(None, "TLS private key (PEM)", group=_SECURITY, metavar="FILE")

    log_format: LogFormat = flag(
        "text", "format of the log lines on stderr", group=_LOGS, choices=("text", "json")
    )
    log_level: str = flag(
        "info", "lowest level logged", group=_LOGS, choices=("debug", "info", "warning", "error")
    )
    access_log: bool = flag(False, "log one line per request, without its text", group=_LOGS)
    request_log: Path | None = flag(
        None, "file that gets the sizes of each request, for tonnage replay", group=_LOGS, metavar="FILE"
    )
    metrics_compat: str = flag(
        "none", "vllm: also export vLLM's names on /metrics, for gateways and autoscalers", group=_LOGS,
        choices=("none", "vllm"),
    )  # fmt: skip
    otlp_traces_endpoint: str | None = flag(
        None, "URL that receives spans of the requests, by OTLP over HTTP", group=_LOGS, metavar="URL",
        read=_endpoint,
    )  # fmt: skip


# Options for a command that loads a model but does not serve it; the remaining options configure the API.
LOADING = ("backend", "lora_modules", "admission_mode", "watermark", "target_itl")
