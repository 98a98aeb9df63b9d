"""Start-up logs -> figures. Lines as vLLM 0.6 to 0.32, SGLang 0.4/0.5 and llama.cpp print them.

"GB" in older vLLM and in SGLang means GiB. A figure printed more than once (ranks, restarts) keeps the last.
"""

from __future__ import annotations

import re
from pathlib import Path

from tonnage.planner.errors import ConfigError
from tonnage.planner.records import dataclass, field
from tonnage.planner.units import GiB, MiB

MAX_LOG_BYTES = 256 << 20


@dataclass(slots=True)
class LogFigures:
    """``figures``: name -> bytes or a count; ``flags``: what the log says the engine was started with."""

    engine: str | None = None
    version: str | None = None
    model: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)


_NUMBER = r"(-?[\d,]+(?:\.\d+)?)"
# (engine, figure, unit, pattern)
_LINES: tuple[tuple[str, str, float, re.Pattern[str]], ...] = tuple(
    (engine, name, unit, re.compile(pattern))
    for engine, name, unit, pattern in (
        ("vllm", "weights_bytes", GiB, rf"Model loading took {_NUMBER} Gi?B"),
        ("vllm", "weights_bytes", GiB, rf"Loading model weights took {_NUMBER} Gi?B"),
        ("vllm", "weights_bytes", GiB, rf"model weights take {_NUMBER} ?GiB"),
        ("vllm", "non_torch_bytes", GiB, rf"non_torch_memory takes {_NUMBER} ?GiB"),
        ("vllm", "activation_bytes", GiB, rf"PyTorch activation peak memory takes {_NUMBER} ?GiB"),
        ("vllm", "activation_bytes", GiB, rf"{_NUMBER} ?GiB for peak activation"),
        ("vllm", "non_torch_bytes", GiB, rf"{_NUMBER} ?GiB for non-torch"),
        ("vllm", "cuda_graph_bytes", GiB, rf"Graph capturing finished in .*took {_NUMBER} Gi?B"),
        ("vllm", "kv_pool_bytes", GiB, rf"Available KV cache memory: {_NUMBER} GiB"),
        ("vllm", "kv_pool_bytes", GiB, rf"reserved for KV Cache is {_NUMBER} ?GiB"),
        ("vllm", "tokens", 1, rf"(?:GPU|CPU|XPU) KV cache size: {_NUMBER} tokens"),
        ("vllm", "num_blocks", 1, rf"# (?:GPU|cuda|CPU|cpu) blocks: {_NUMBER}"),
        ("vllm", "max_concurrency", 1, rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x"),
        ("vllm", "max_model_len", 1, rf"Maximum concurrency for {_NUMBER} tokens per request"),
        ("sglang", "weights_bytes", GiB, rf"Load weight end\..*mem usage={_NUMBER} GB"),
        ("sglang", "tokens", 1, rf"max_total_num_tokens={_NUMBER}"),
        ("sglang", "kv_pool_bytes", GiB, rf"SWAKVPool mem usage: {_NUMBER} GB"),
        ("llama.cpp", "weights_bytes", GiB, rf"model size\s*=\s*{_NUMBER} GiB"),
        ("llama.cpp", "max_model_len", 1, rf"n_ctx\s*=\s*{_NUMBER}"),
        ("vllm", "device_bytes", GiB, rf"Free memory on device .*?/{_NUMBER} ?GiB"),
        ("vllm", "device_bytes", GiB, rf"total_gpu_memory \({_NUMBER} ?GiB\)"),
    )
)
_SGLANG_POOL = re.compile(
    rf"KV Cache is allocated\..*#tokens: [\d,]+, K size: {_NUMBER} GB, V size: {_NUMBER} GB"
)
_SGLANG_WINDOWS = re.compile(rf"swa size: {_NUMBER}, full size: {_NUMBER}")
_SGLANG_FORMAT = re.compile(r"Load weight end\..*quant=(\w+)")
# llama.cpp: "size = 640.00 MiB ( 16384 cells,  5 layers,  2/2 seqs), K (f16): 320.00 MiB, V (f16): 320.00 MiB"
# (sequences / streams, each of so many cells); ik_llama.cpp and older:
# "KV self size  = 135.00 MiB, K (f16):   81.00 MiB, V (f16):   54.00 MiB"
_LLAMA_POOL = re.compile(
    rf"(?:(?:llama_kv_cache\w*|llama_memory_recurrent): size|KV self size)\s*=\s*{_NUMBER} MiB"
)
_LLAMA_UBATCH = re.compile(r"n_ubatch\s*=\s*(\d+)")
_LLAMA_FILE = re.compile(r"llama_model_loader: loaded meta data .* from (\S+\.gguf)")
_LLAMA_CELLS = re.compile(r"\(\s*(\d+) cells,\s*\d+ layers,\s*(?:\d+/\s*)?(\d+) seqs\)")
_LLAMA_TYPES = re.compile(r"(?:K|c\^KV) \((\w+)\)(?:.*?V \((\w+)\))?")
_SERVER_ARGS = re.compile(r"server_args=ServerArgs\((.*)\)")
_SGLANG_NAMES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "model_path": "model",
    "page_size": "block_size",
}
_UTILIZATION = re.compile(r"tilization (?:is )?\((\d\.\d+)")
_BATCH = re.compile(r"max_num_batched_tokens=(\d+)")
_VERSION = re.compile(r"(?:vLLM (?:API server )?version|LLM engine \(v)[ :]*v?(\d+\.\d+[\w.+-]*)")
_ARGUMENTS = re.compile(r"non-default args: \{(.*)\}")
_PAIR = re.compile(r"'(\w+)': ('[^']*'|[\w.+-]+)")
_ARGUMENT = re.compile(r"(\w+)=('[^']*'|[\w.+-]+)")


def read_log(path: Path) -> LogFigures:
    """Raises ConfigError when the file cannot be read or holds no line that is known here."""
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise ConfigError("is larger than a start-up log can be", field=str(path))
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from None
    found = parse_log(text)
    if not found.figures:
        raise ConfigError(
            "holds no start-up line of vLLM, SGLang or llama.cpp", field=str(path),
            hint="give the log from the engine's start, for example docker logs CONTAINER > start.log",
        )  # fmt: skip
    return found


def parse_log(text: str) -> LogFigures:
    out = LogFigures()
    pools = 0.0
    for line in text.splitlines():
        for engine, name, unit, pattern in _LINES:
            if match := pattern.search(line):
                out.figures[name] = _value(match[1]) * unit
                out.engine = out.engine or engine
        if match := _SGLANG_POOL.search(line):
            out.engine, pools = "sglang", pools + (_value(match[1]) + _value(match[2])) * GiB
        if match := _LLAMA_POOL.search(line):
            out.engine, pools = "llama.cpp", pools + _value(match[1]) * MiB
            _llama_cache(line, out)
        if match := _LLAMA_UBATCH.search(line):
            out.flags["max_num_batched_tokens"] = match[1]
        if match := _LLAMA_FILE.search(line):
            out.model = match[1]
        if match := _SERVER_ARGS.search(line):
            given = {key: value.strip("'") for key, value in _ARGUMENT.findall(match[1])}
            out.flags |= {_SGLANG_NAMES.get(key, key): value for key, value in given.items() if value != "None"}
            out.model = out.flags.get("model") or out.model
        if match := _SGLANG_WINDOWS.search(line):
            out.flags["swa_full_tokens_ratio"] = str(_value(match[1]) / max(1.0, _value(match[2])))
        if (match := _SGLANG_FORMAT.search(line)) and match[1] != "None":
            out.flags["quantization"] = match[1]
        if match := _UTILIZATION.search(line):
            out.flags["gpu_memory_utilization"] = match[1]
        if match := _BATCH.search(line):
            out.flags.setdefault("max_num_batched_tokens", match[1])
        if match := _VERSION.search(line):
            out.version = match[1].rstrip(".,)")
        if match := _ARGUMENTS.search(line):
            out.flags |= {key: value.strip("'") for key, value in _PAIR.findall(match[1])}
            out.model = out.flags.get("model") or out.flags.get("model_tag") or out.model
    if cells := out.figures.pop("cells", 0.0):  # n_ctx is what all streams share
        out.figures["max_model_len"] = cells
    if pools and "kv_pool_bytes" not in out.figures:
        out.figures["kv_pool_bytes"] = pools
    return out


def _llama_cache(line: str, out: LogFigures) -> None:
    """Cells of the longest cache, streams they are divided for, types of K and V."""
    if cells := _LLAMA_CELLS.search(line):
        out.figures["cells"] = max(out.figures.get("cells", 0.0), _value(cells[1]))
        out.flags["max_num_seqs"] = cells[2]
    if types := _LLAMA_TYPES.search(line):
        out.flags["kv_cache_dtype"] = "/".join(kind for kind in types.groups() if kind)


def _value(text: str) -> float:
    return float(text.replace(",", ""))
