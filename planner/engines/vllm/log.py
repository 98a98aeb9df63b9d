"""Patterns of vLLM's start-up log, 0.5 to 0.33. "GB" in older versions means GiB.

The source of the patterns for the V0 engine is worker/worker.py (0.6 to 0.9). The sources for the V1 engine
(0.9.2 to 0.33) are v1/worker/gpu_worker.py, gpu_model_runner.py, gpu/model_runner.py, cpu_worker.py,
v1/core/kv_cache_utils.py (in 0.33 kv_cache_planning.py), utils/mem_utils.py and config/vllm.py. Some logged
figures are corrected:

- Up to 0.26, ``activation_bytes`` is the memory peak of the profile run without the weights. In lines with
  "consumed memory", "peak activation" includes the estimate of the CUDA graphs, which is subtracted here.
- ``peak_torch_memory`` of 0.6.3 to 0.6.5 includes the weights, which are subtracted here.
- A rank that does not print its pool prints requested memory and "non KV cache memory". The pool is their
  difference.
"""

from __future__ import annotations

import re

from tonnage.planner.engines.log import NUMBER, LogFigures, arguments, compiled, keep, read_figures, squeezed
from tonnage.planner.units import GiB

_LINES = (
    ("weights_bytes", GiB, rf"Model loading took {NUMBER}Gi?B"),
    ("weights_bytes", GiB, rf"Loading model weights took {NUMBER}Gi?B"),
    ("weights_bytes", GiB, rf"model weights take {NUMBER}GiB"),
    ("weights_bytes", GiB, rf"{NUMBER}GiB for weight,"),
    ("weights_bytes", GiB, rf"weights memory: {NUMBER}GiB"),
    ("non_torch_bytes", GiB, rf"non_torch_memory (?:takes)? {NUMBER}GiB"),
    ("non_torch_bytes", GiB, rf"{NUMBER}GiB for non-torch"),
    ("non_torch_bytes", GiB, rf"non-torch forward increase memory: {NUMBER}GiB"),
    ("activation_bytes", GiB, rf"PyTorch activation peak memory (?:takes)? {NUMBER}GiB"),
    ("activation_bytes", GiB, rf"{NUMBER}GiB for peak activation"),
    ("cuda_graph_bytes", GiB, rf"Graph capturing finished in .*?took {NUMBER}Gi?B"),
    ("cuda_graph_bytes", GiB, rf"{NUMBER}GiB for CUDAGraph memory"),
    ("cuda_graph_bytes", GiB, rf"CUDA graph pool memory: {NUMBER}GiB \(actual\)"),
    ("graph_estimate_bytes", GiB, rf"Estimated CUDA graph memory: {NUMBER}GiB total"),
    ("graph_estimate_bytes", GiB, rf"\(actual\), {NUMBER}GiB \(estimated\)"),
    # the logged "consumed memory" includes weights and non-torch memory
    ("consumed_bytes", GiB, rf"{NUMBER}GiB for consumed memory"),
    ("consumed_bytes", GiB, rf"total consumed \(from mem_get_info\): {NUMBER}GiB"),
    ("non_kv_bytes", GiB, rf"Total non KV cache memory: {NUMBER}GiB"),
    ("kv_pool_bytes", GiB, rf"Available KV cache memory: {NUMBER}GiB"),
    # vLLM logs this reduced pool size after it subtracted the image encoder's memory from the pool.
    ("kv_pool_bytes", GiB, rf"KV cache memory reduced to {NUMBER}GiB"),
    ("kv_pool_bytes", GiB, rf"reserved for KV Cache is {NUMBER}GiB"),
    ("kv_pool_bytes", GiB, rf"available_kv_cache_memory {NUMBER}GiB"),
    ("kv_pool_bytes", GiB, rf"kv_cache_size={NUMBER}GiB"),
    ("kv_pool_bytes", GiB, rf"reserved {NUMBER}GiB memory for KV Cache as specified"),
    ("kv_pool_bytes", GiB, rf"(?:Explicitly|Auto) set \({NUMBER}/[\d.]+\)GiB for KV cache"),
    ("tokens", 1, rf"(?:GPU|CPU|XPU|TPU|HPU) KV cache size: {NUMBER} tokens"),
    ("num_blocks", 1, rf"# (?:GPU|cuda|CUDA|CPU|cpu|rocm|xpu|hpu|tpu|neuron) blocks: {NUMBER}"),
    ("num_blocks", 1, rf"after num_gpu_blocks is: {NUMBER}"),
    ("max_concurrency", 1, rf"Maximum concurrency for [\d,]+ tokens per request: {NUMBER}x"),
    ("max_model_len", 1, rf"Maximum concurrency for {NUMBER} tokens per request"),
    ("requested_bytes", GiB, rf"worker requested memory: {NUMBER}GiB"),
    ("requested_bytes", GiB, rf"Requested memory: [\d.]+ \(util\), {NUMBER}GiB"),
    ("requested_bytes", GiB, rf"Desired GPU memory utilization is \([\d.]+, {NUMBER}GiB"),
    ("requested_bytes", GiB, rf"the current vLLM instance can use .*?= {NUMBER}GiB"),
    ("free_bytes", GiB, rf"Free memory on device[^(]*\({NUMBER}/[\d.]+GiB"),
    ("device_bytes", GiB, rf"Free memory on device[^(]*\([\d.]+/{NUMBER}GiB"),
    ("device_bytes", GiB, rf"total_gpu_memory \(?=?{NUMBER}GiB"),
    ("device_bytes", GiB, rf"(?:Explicitly|Auto) set \([\d.]+/{NUMBER}\)GiB for KV cache"),
)
# "worker init memory snapshot: torch_peak=0.0GiB, free_memory=77.71GiB, total_memory=79.19GiB, ..." is taken
# before the model is loaded. The non_torch_memory of this line is CUDA's context and NCCL. Lines after the
# profile run print another figure under the same name.
_SNAPSHOT = (
    ("free_bytes", GiB, rf"free_memory={NUMBER}GiB"),
    ("device_bytes", GiB, rf"total_memory={NUMBER}GiB"),
    ("init_non_torch_bytes", GiB, rf"non_torch_memory={NUMBER}GiB"),
)
# vLLM 0.6.3 to 0.6.5 log "Memory profiling results: total_gpu_memory=..., peak_torch_memory=...,
# non_torch_memory=...".
_PROFILE = (
    ("peak_torch_bytes", GiB, rf"peak_torch_memory={NUMBER}GiB"),
    ("non_torch_bytes", GiB, rf"non_torch_memory={NUMBER}GiB"),
)
_OLD_PEAK = rf"torch peak memory increase: {NUMBER}GiB; non-torch"
_NOT_APPLIED = r"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0\)|To try it now, set VLLM_MEMORY_PROFILER"

# Name of a flag -> pattern of the log line that prints its value.
_PRINTED = {
    "gpu_memory_utilization": r"tilization (?:is)? [(=](\d\.\d+)",
    "max_num_batched_tokens": r"max_num_batched_tokens (?:=|to) (\d+)",
    "max_num_seqs": r"Defaulting max_num_seqs to (\d+)",
    "max_model_len": r"Using max model len (\d+)",
}
_VERSION = r"(?:vLLM (?:API)? (?:server)? version|LLM engine \(v|█ version|▄ version) [:v]* (\d+\.\d+[\w.+-]*)"
_GIVEN = (("non-default args: {", ":"), ("args: Namespace(", "="))
_CONFIG = "with config: "
# Name in vLLM's config line -> name of the flag, where they differ.
_NAMES = {"max_seq_len": "max_model_len", "model_tag": "model"}
_TYPES = r"torch\.(\w+)"

_STARTED = (
    "Application startup complete", "init engine (profile", "Starting vLLM server on",
    "Starting vLLM API server",
)  # fmt: skip
_RANKS = (
    r"\((?:Vllm)?Worker_(?P<name>[A-Z]+\d[A-Z0-9_]*)(?: pid=(?P<pid>\d+))?\)",
    r"\(VllmWorker (?:rank=|TP)(?P<number>\d+)(?: pid=(?P<pid>\d+))?\)",
    r"\(\w*Worker\w*[^)]*?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\d.:a-f]+))?\)",
    r"\(EngineCore_(?:DP)?(?P<replica>\d+)(?: pid=(?P<pid>\d+))?\)",
    r"\b(?:Vllm)?Worker_(?P<name>[A-Z]+\d[A-Z0-9_]*)\b",
)


def read_line(line: str, out: LogFigures) -> None:
    """Add the memory figures and flags of one log record to ``out``.

    The record may be wrapped, and has no colour codes.
    """
    text = squeezed(line)
    before = len(out.figures)
    if "memorysnapshot:" in text:
        read_figures("vllm", _SNAPSHOT, text, out)
        return
    if "Memoryprofilingresults:" in text:
        read_figures("vllm", _PROFILE, text, out)
    read_figures("vllm", _LINES, text, out)
    if match := compiled(_OLD_PEAK).search(text):
        keep(out, "activation_bytes", match[1], GiB)
    if "consumedmemory(weights" in text:
        out.state.add("activation has graphs")
    if compiled(_NOT_APPLIED).search(text):
        out.state.add("graphs not applied")
    for name, pattern in _PRINTED.items():
        if match := compiled(pattern).search(text):
            out.flags.setdefault(name, match[1])
    if match := compiled(_VERSION).search(text):
        out.version = match[1].rstrip(".,)-")
        out.engine = out.engine or "vllm"
    _read_arguments(line, out)
    if len(out.figures) > before and "CPUKVcachesize" in text:
        out.flags["device"] = "cpu"


def _read_arguments(line: str, out: LogFigures) -> None:
    for mark, sign in _GIVEN:
        if mark in line:
            given = dict(arguments(line.partition(mark)[2], sign))
            out.flags |= {_NAMES.get(k, k): _plain(value) for k, value in given.items() if value != "None"}
            out.model = given.get("model") or given.get("model_tag") or out.model
    if _CONFIG in line and "model=" in line:
        config = dict(arguments(line.partition(_CONFIG)[2], "="))
        for name, value in config.items():
            if name == "data_parallel_size":
                continue  # every replica logs 1 instead of the number of replicas
            if value != "None":
                out.flags.setdefault(_NAMES.get(name, name), _plain(value))
        if config.get("device_config") == "cpu":
            out.flags["device"] = "cpu"
        out.model = out.model or config.get("model")
        out.engine = out.engine or "vllm"


def _plain(value: str) -> str:
    if value.startswith("{"):  # a flag's value that is a dict in Python's notation
        return value.replace("'", '"')
    match = re.fullmatch(_TYPES, value)
    return match[1] if match else value


def rank_of(line: str) -> tuple[str, str]:
    """Return the rank and the process that the prefix of a vLLM log line names.

    The rank is a text such as ``PP0_TP1``, ``TP1`` or ``DP1``. The process is its id, in Ray's logs after the
    node's address. Each is "" if the line does not name it.
    """
    for pattern in _RANKS:
        if (match := re.search(pattern, line[:400])) is None:
            continue
        found = match.groupdict()
        process = ":".join(filter(None, (found.get("ip"), found.get("pid"))))
        if name := found.get("name"):  # the EP rank is left out, because it follows from the TP rank
            return "_".join(part for part in name.split("_") if not part.startswith("EP")) or name, process
        if number := found.get("number"):
            return f"TP{number}", process
        if replica := found.get("replica"):
            return f"DP{replica}", process
        return "", process
    return "", ""


def settle(out: LogFigures) -> None:
    """Derive memory figures that a rank's start-up log does not print from those that it prints."""
    found, rounding = out.figures, out.rounding

    def follows(name: str, whole: str, *parts: str) -> None:
        if name not in found and whole in found and all(part in found for part in parts):
            found[name] = found[whole] - sum(found[part] for part in parts)
            rounding[name] = sum(rounding.get(part, 0.0) for part in (whole, *parts))

    applied = "graphs not applied" not in out.state
    graphs = ("graph_estimate_bytes",) if applied and "graph_estimate_bytes" in found else ()
    if "activation has graphs" in out.state and graphs and "activation_bytes" in found:
        found["activation_bytes"] -= found["graph_estimate_bytes"]
        rounding["activation_bytes"] += rounding.get("graph_estimate_bytes", 0.0)
    follows("activation_bytes", "peak_torch_bytes", "weights_bytes")
    follows("non_torch_bytes", "consumed_bytes", "weights_bytes")
    follows("activation_bytes", "non_kv_bytes", "consumed_bytes")
    follows("kv_pool_bytes", "requested_bytes", "non_kv_bytes", *graphs)


def started(line: str) -> bool:
    """Return whether a line of vLLM's log reports that the engine is ready to serve."""
    return any(mark in line for mark in _STARTED)
