"""Argument parsers of the server's commands, with one function per command.

The parsers are not in the modules of the commands, because ``--help``, shell completion and the manual page
need only the options. This module imports neither the server nor the cache, nor their libraries.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from tonnage.planner.arguments import Parser
from tonnage.planner.command import COLUMNS
from tonnage.planner.deployment import Deployment
from tonnage.planner.flags import add_flags, add_groups, flags_of
from tonnage.planner.headers.hub import add_token_flag
from tonnage.server.options import LOADING, PLANNED, Options

_MODEL = "demo, a folder with config.json, a .gguf file, or a hub id (org/name or org/name@revision)"


def _add_settings(p: Parser, names: tuple[str, ...] | None = None) -> None:
    """Add the model, the flags that ``tonnage plan`` shares with a server, and a server's options to a parser.

    Args:
        p: The parser of a command.
        names: Names of the Options to add; None adds all.

    An option that is absent from the command line is absent from the namespace, so that an environment variable
    or the configuration file can set it.
    """
    p.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=_MODEL)
    add_token_flag(p)
    p.add_argument("--config", metavar="FILE", help="TOML file of these settings")
    add_groups(p, Deployment, PLANNED, default=argparse.SUPPRESS)
    add_groups(p, Options, names, default=argparse.SUPPRESS)


def serve() -> Parser:
    """Return the parser of ``tonnage serve``."""
    p = Parser(
        "tonnage serve",
        "Plan a model's memory, then serve the OpenAI API, /metrics and /memory from that plan.",
        """
Every option is also read from the environment, as TONNAGE_MAX_MODEL_LEN for --max-model-len, and from a TOML
file (--config): max_model_len = 8192. A flag overrides the environment, which overrides the file.

SIGTERM: /ready returns 503 and new requests are rejected; running requests have --drain-seconds to end.

The lines "listening on URL" and "ready on URL" on stdout are for scripts; --port 0 takes a free port.
exit codes: 0 stopped by SIGTERM, 1 the engine failed, 2 bad input or the model does not fit, 130 Ctrl-C.

examples:
  tonnage serve demo --kv-cache-memory-bytes 512MiB
  tonnage serve ./Llama-3.1-8B --quantization nf4 --max-model-len 8192 --port 8080
""",
    )
    _add_settings(p)
    p.add_argument("--print-config", action="store_true", help="print the settings as JSON and exit")
    return p


def verify() -> Parser:
    """Return the parser of ``tonnage verify``."""
    p = Parser(
        "tonnage verify",
        "Load a model and compare its plan with the measured bytes.",
        """
It compares the weights and the KV pool (both to the byte), the KV bytes of a token, and the peak memory of all
server processes together under a full batch (within 10 %; without what the plan reserves for grammars).
exit codes: 0 within the bounds, 1 outside (or the engine failed), 2 bad input or the model does not fit.
""",
    )
    _add_settings(p, LOADING)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


# Flags of `tonnage plan` that `tonnage replay` also accepts.
_REPLAYED = (
    "gpu", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "enable_prefix_caching", "tensor_parallel_size", "quantization", "kv_cache_dtype",
    "block_size",
)  # fmt: skip


def replay() -> Parser:
    """Return the parser of ``tonnage replay``."""
    p = Parser(
        "tonnage replay",
        "Replay a request trace through admission and the block manager, without a GPU.",
        """
TRACE is an Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens), a Mooncake JSONL (timestamp, input_length,
output_length, hash_ids), the request log (arrival, prompt_tokens, output_tokens, ...), agentic sessions
(a .json file or a folder of them), RAGPulse's 0_trace.jsonl, or KV events of vLLM (JSON lines, or the msgpack
payloads of its publisher in one file). For any other CSV or JSONL, --columns names the columns; a time is a
number of seconds (arrival_ms=COLUMN: milliseconds) or a date.

examples:
  tonnage replay conversation.jsonl --model ./Llama-3.1-8B --gpu h100-80g
  tonnage replay azure.csv --model demo --kv-cache-memory-bytes 1GiB --memory-bandwidth 50 --flops 2 --scale 0.1
  tonnage replay conversation.jsonl --model ./Llama-3.1-8B --gpu l40s-48g --search-gpus --wait-target 1s
  tonnage replay conversation.jsonl --model ./Llama-3.1-8B --gpu h100-80g --tiers host=64GiB --tier-curve
  tonnage replay azure.csv --model ./Llama-3.1-70B --gpu h100-80g -tp 4
  tonnage replay own.csv --columns arrival=t,prompt_tokens=in,output_tokens=out --model demo --gpu l4-24g

Steps, preemptions, stalls and hits are the decisions of block manager and admission for these arrivals. Times
follow from a roofline of the device's peak figures: no engine is faster, most are slower.
exit codes: 0 done, 1 no number of GPUs meets the target, 2 bad input or the model does not fit.
""",
    )
    p.add_argument("trace", metavar="TRACE", help="the trace file")
    p.add_argument("--model", required=True, metavar="MODEL", help=_MODEL)
    add_token_flag(p)
    add_flags(p, Deployment, _REPLAYED)
    policies = flags_of(Options)["admission_mode"]
    p.add_argument(
        "--policy", default="guaranteed", type=policies.canonical, choices=policies.choices,
        metavar="|".join(policies.choices), help="mode of admission (default: guaranteed)",
    )  # fmt: skip
    p.add_argument("--length-quantile", type=float, metavar="Q", help="quantile of lengths; 1: max_tokens")
    p.add_argument("--watermark", type=float, metavar="SHARE", help="share of the pool to leave free")
    p.add_argument(
        "--max-tokens", metavar="N", help="for requests without; default: longest output of the trace"
    )
    p.add_argument("--scale", type=float, default=1.0, metavar="X", help="multiply the rate of arrivals")
    p.add_argument("--limit", metavar="N", help="replay only the first N requests")
    p.add_argument("--columns", metavar="NAME=COLUMN,...", help=COLUMNS)
    p.add_argument("--skip-bad-lines", action="store_true", help="skip and count lines that do not parse")
    p.add_argument("--memory-bandwidth", type=float, metavar="GB/s", help="of one device; default: by --gpu")
    p.add_argument("--flops", type=float, metavar="TFLOP/s", help="dense 16-bit peak of one device")
    p.add_argument(
        "--tiers", metavar="host=SIZE,disk=SIZE", help="KV tiers behind the pool, judged by two replays"
    )
    p.add_argument(
        "--tier-policy", choices=("lru", "arc", "learned"), help="order of eviction in tiers (default: lru)"
    )
    p.add_argument("--tier-curve", action="store_true", help="hit rate by size of pool and tiers, in one pass")
    p.add_argument("--host-bandwidth", type=float, metavar="GB/s", help="host memory to GPU; default: by --gpu")
    p.add_argument("--disk-bandwidth", type=float, metavar="GB/s", help="disk to host memory")
    p.add_argument("--search-gpus", action="store_true", help="find how many of these GPUs meet --wait-target")
    p.add_argument("--wait-target", metavar="TIME", help="bound of the P99 waiting time (default: 1s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--html", metavar="FILE", help="write a page with plots to FILE")
    return p


def watch() -> Parser:
    """Return the parser of ``tonnage watch``."""
    p = Parser(
        "tonnage watch",
        "Show a running server beside its plan: memory, KV use, headroom, requests, preemptions.",
        """
The server is recognised by its /metrics; llama-server shows them with --metrics, SGLang with --enable-metrics.
Its plan is made from what the server reports and from the flags given here, which are the flags of tonnage
plan. A flag that contradicts the server is an error; a figure that does not follow from the known values is
left out.

exit codes: 0 done (or stopped), 1 the server cannot be read, 2 bad input. With --port, and after the first
successful look, a watch continues when the server does not answer.

examples:
  tonnage watch http://localhost:8000 --gpu h100-80g
  tonnage watch http://localhost:30000 --gpu h200-141g --once --json
  tonnage watch http://localhost:8080 --model ./model.gguf --no-kv-unified
  tonnage watch http://vllm:8000 --model ./Llama-3.1-8B --gpu l40s-48g --port 9401 --host 0.0.0.0
""",
    )
    p.add_argument("url", metavar="URL", help="address of the server, for example http://localhost:8000")
    p.add_argument(
        "--model", metavar="MODEL", help="model it loaded: a folder with config.json, a .gguf file or a hub id "
        "(default: the name that the server reports)",
    )  # fmt: skip
    add_token_flag(p)
    p.add_argument("--once", action="store_true", help="look once")
    p.add_argument("--interval", metavar="SECONDS", help="time from one look to the next (default: 5)")
    p.add_argument("--json", action="store_true", help="print one JSON object per look, each on one line")
    p.add_argument("--port", metavar="N", help="also serve the results to Prometheus, at /metrics on this port")
    p.add_argument("--host", metavar="HOST", help="address of --port (default: 127.0.0.1)")
    _add_client(p)
    planned = p.add_argument_group("the plan, where the server does not report it")
    for name, flag in flags_of(Deployment).items():
        if name != "engine":  # `tonnage watch` detects the engine from the server's metrics
            flag.add_to(planned)
    return p


# The default URL of the commands that query a server; its host and port are the defaults of Options.
_HERE = "http://127.0.0.1:8000"


def status() -> Parser:
    """Return the parser of ``tonnage status``."""
    p = Parser(
        "tonnage status",
        "Show what a Tonnage server holds, which requests it runs and how much more fits.",
        """
It reads the server's /memory: the model, the time since it is ready, planned and measured bytes, the KV pool by
state, running and waiting requests with the oldest of each, how much more fits, and how long a stop would take.
The page at / of the server shows the same; tonnage watch shows other servers, and rates.

exit codes: 0 done (or stopped), 1 the server cannot be read, 2 bad input. With --watch, and after the first
successful look, it continues when the server does not answer.

examples:
  tonnage status
  tonnage status gpu-7:8000 --watch
  tonnage status https://llm.example.com --api-key KEY --json
""",
    )
    p.add_argument("url", nargs="?", default=_HERE, metavar="URL", help=f"server (default: {_HERE})")
    p.add_argument("--watch", action="store_true", help="repeat until stopped")
    p.add_argument("--interval", metavar="SECONDS", help="between two looks (default: 2); implies --watch")
    p.add_argument("--json", action="store_true", help="print one JSON object per look: /memory, with the URL")
    _add_client(p)
    return p


def _add_client(p: Parser) -> None:
    """Add the options of commands that query a running server."""
    p.add_argument("--timeout", default="10", metavar="SECONDS", help="for each answer (default: 10)")
    p.add_argument(
        "--api-key", metavar="KEY", help="sent as a bearer token (default: TONNAGE_API_KEY of the environment)"
    )


def doctor() -> Parser:
    """Return the parser of ``tonnage doctor``."""
    p = Parser(
        "tonnage doctor",
        "Print what is installed, which device was found and which backend would be chosen.",
        "example: tonnage doctor ./Llama-3.1-8B",
    )
    p.add_argument("model", nargs="?", metavar="MODEL", help="also print which backend would serve it")
    add_token_flag(p)
    p.add_argument("--fields", action="store_true", help="also print how the API treats every request field")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


DEMO_POOL = "512MiB"


def demo() -> Parser:
    """Return the parser of ``tonnage demo``."""
    return Parser(
        "tonnage demo",
        "Plan, serve, query and measure the demo model (SmolLM2-135M-Instruct), then stop.",
        f"The KV pool is {DEMO_POOL}. Exit codes: 0 the plan held, 1 it did not, 2 something is missing.",
    )


PARSERS: Mapping[str, Callable[[], Parser]] = {
    "serve": serve, "verify": verify, "replay": replay, "watch": watch, "status": status, "doctor": doctor,
    "demo": demo,
}  # fmt: skip
