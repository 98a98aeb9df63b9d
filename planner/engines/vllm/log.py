"""Lines of vLLM's start-up log, 0.6 to 0.32. "GB" in older ones means GiB."""

from __future__ import annotations

from tonnage.planner.engines.log import NUMBER, LogFigures, compiled, read_figures
from tonnage.planner.units import GiB

_LINES = (
    ("weights_bytes", GiB, rf"Model loading took {NUMBER} Gi?B"),
    ("weights_bytes", GiB, rf"Loading model weights took {NUMBER} Gi?B"),
    ("weights_bytes", GiB, rf"model weights take {NUMBER} ?GiB"),
    ("non_torch_bytes", GiB, rf"non_torch_memory takes {NUMBER} ?GiB"),
    ("activation_bytes", GiB, rf"PyTorch activation peak memory takes {NUMBER} ?GiB"),
    ("activation_bytes", GiB, rf"{NUMBER} ?GiB for peak activation"),
    ("non_torch_bytes", GiB, rf"{NUMBER} ?GiB for non-torch"),
    ("cuda_graph_bytes", GiB, rf"Graph capturing finished in .*took {NUMBER} Gi?B"),
    ("cuda_graph_bytes", GiB, rf"{NUMBER} ?GiB for CUDAGraph memory"),
    ("consumed_bytes", GiB, rf"{NUMBER} ?GiB for consumed memory"),  # weights and what is not torch's
    ("kv_pool_bytes", GiB, rf"Available KV cache memory: {NUMBER} GiB"),
    ("kv_pool_bytes", GiB, rf"reserved for KV Cache is {NUMBER} ?GiB"),
    ("tokens", 1, rf"(?:GPU|CPU|XPU) KV cache size: {NUMBER} tokens"),
    ("num_blocks", 1, rf"# (?:GPU|cuda|CPU|cpu) blocks: {NUMBER}"),
    ("max_concurrency", 1, rf"Maximum concurrency for [\d,]+ tokens per request: {NUMBER}x"),
    ("max_model_len", 1, rf"Maximum concurrency for {NUMBER} tokens per request"),
    ("device_bytes", GiB, rf"Free memory on device .*?/{NUMBER} ?GiB"),
    ("device_bytes", GiB, rf"total_gpu_memory \({NUMBER} ?GiB\)"),
)
_UTILIZATION = r"tilization (?:is )?\((\d\.\d+)"
_BATCH = r"max_num_batched_tokens=(\d+)"
_VERSION = r"(?:vLLM (?:API server )?version|LLM engine \(v)[ :]*v?(\d+\.\d+[\w.+-]*)"
_ARGUMENTS = r"non-default args: \{(.*)\}"
_PAIR = r"'(\w+)': ('[^']*'|[\w.+-]+)"


def read_line(line: str, out: LogFigures) -> None:
    read_figures("vllm", _LINES, line, out)
    if match := compiled(_UTILIZATION).search(line):
        out.flags["gpu_memory_utilization"] = match[1]
    if match := compiled(_BATCH).search(line):
        out.flags.setdefault("max_num_batched_tokens", match[1])
    if match := compiled(_VERSION).search(line):
        out.version = match[1].rstrip(".,)")
    if match := compiled(_ARGUMENTS).search(line):
        out.flags |= {key: value.strip("'") for key, value in compiled(_PAIR).findall(match[1])}
        out.model = out.flags.get("model") or out.flags.get("model_tag") or out.model
