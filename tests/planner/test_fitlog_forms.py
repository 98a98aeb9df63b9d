# ruff: noqa: E501 (lines of logs)
"""Tests of log formats: versions, interleaved ranks, colours, prefixes, wrapped lines and failed starts.

Real logs are in tests/data/startup_logs. Short logs here copy the wording of the engines' sources.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.planner.fitlog.read import parse_log, records

LOGS = Path(__file__).parent.parent / "data" / "startup_logs"
GIB = 1 << 30
# GiB per rank as the logs print them: (weights, activations, non-torch, estimated graphs, pool)
TOLD = {
    "meta-llama---h100-80gb--tp1pp1dp1--8192-dtbf16-kvfp8": {"": (14.99, 1.89, 0.25, 0.84, 58.11)},
    "meta-llama-llama-3---h100-80gb--tp1pp1dp1--8192-qfp8": {"": (8.49, 1.89, 0.25, 0.84, 64.61)},
    "meta-llama-llama-3--h100-80gb--tp1pp1dp1--8192-dtf32": {"": (29.98, 2.21, 0.25, 0.80, 42.80)},
    # the pools of PP1 to PP3 are not printed: requested 75.23 less what is not KV (4.40, 4.40, 6.34)
    "meta-llama-llama-3-1-8b---h100-80gb--tp1pp4dp1--8192": {
        "PP0": (4.26, 1.10, 0.07, 0.49, 69.80), "PP1": (3.28, 1.05, 0.07, 0.49, 70.83),
        "PP2": (3.28, 1.05, 0.07, 0.49, 70.83), "PP3": (4.26, 2.01, 0.07, 0.49, 68.89),
    },
    "qwen-qwen2-5-7b-instruct--h100-80gb--tp2pp1dp1--8192": {
        "TP0": (7.12, 2.21, 2.06, 0.61, 63.84), "TP1": (7.12, 2.21, 2.06, 0.61, 63.84),
    },
}  # fmt: skip
FIGURES = ("weights_bytes", "activation_bytes", "non_torch_bytes", "graph_estimate_bytes", "kv_pool_bytes")


def text_of(name):
    return (LOGS / f"{name}.log").read_text()


@pytest.mark.parametrize("name", TOLD)
def test_memory_figures_of_a_log_are_kept_per_rank(name):
    found = parse_log(text_of(name))
    told = {
        rank: tuple(round(own.figures[figure] / GIB, 2) for figure in FIGURES)
        for rank, own in found.ranks.items()
    }
    assert told == TOLD[name]
    assert (found.engine, found.version, found.ready, found.failure) == ("vllm", "0.19.0", True, None)
    worst = min(TOLD[name].values(), key=lambda figures: figures[-1])
    assert found.figures["kv_pool_bytes"] / GIB == pytest.approx(worst[-1])
    assert found.flags["max_num_seqs"] == "1024"
    assert found.flags["max_num_batched_tokens"] == "8192"


def wrapped(text, width):
    parts = ([line[i : i + width] for i in range(0, max(1, len(line)), width)] for line in text.splitlines())
    return "\n".join(part for line in parts for part in line)


def each(text, change):
    return "\n".join(change(line) for line in text.splitlines())


DRESSED = {
    **{f"wrapped at {width}": lambda text, width=width: wrapped(text, width) for width in (60, 80, 97, 132)},
    "docker compose": lambda text: each(text, lambda line: f"vllm-1  | {line}"),
    "kubelet": lambda text: each(text, lambda line: f"2026-04-22T01:43:37.123456789Z stdout F {line}"),
    "colours": lambda text: each(text, lambda line: "\x1b[1;36m" + line.replace(") ", ")\x1b[0;0m ", 1)),
    "colours in JSON": lambda text: each(
        text, lambda line: '{"log":"\\u001b[1;36m' + line.replace(") ", ")\\u001b[0;0m ", 1) + '\\n"}'
    ),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "quoted": lambda text: each(text, lambda line: f"> {line}"),
}


@pytest.mark.parametrize("dress", DRESSED)
def test_prefixes_colours_and_wrapping_of_log_lines_change_no_parsed_figure(dress):
    for name in TOLD:
        plain, other = parse_log(text_of(name)), parse_log(DRESSED[dress](text_of(name)))
        assert {rank: own.figures for rank, own in other.ranks.items()} == {
            rank: own.figures for rank, own in plain.ranks.items()
        }
        assert (other.figures, other.version, other.model) == (plain.figures, plain.version, plain.model)
        for flag in ("dtype", "kv_cache_dtype", "tensor_parallel_size", "max_num_seqs", "quantization"):
            assert other.flags.get(flag) == plain.flags.get(flag)


def test_failure_message_is_read_from_the_log_of_a_failed_start():
    found = parse_log(text_of("meta-llama-llama-3-1-8b---h100-80gb--tp1pp1dp2--8192.FAILED"))
    assert found.failure == "AssertionError: DP adjusted local rank 1 is out of bounds."
    assert not found.ready
    assert found.flags["data_parallel_size"] == "2"


def gib_of(text):
    return {
        name: round(size / GIB, 2) for name, size in parse_log(text).figures.items() if name.endswith("_bytes")
    }


def test_log_lines_of_vllm_0_6_to_0_8_are_read():
    """0.6.4's peak includes the weights; 0.7 has SageMaker's prefix and colours; 0.8 has ranks."""
    assert gib_of(
        "INFO 12-06 11:39:34 model_runner.py:1077] Loading model weights took 2.6419 GB\n"
        "INFO 12-06 11:39:36 worker.py:232] Memory profiling results: total_gpu_memory=7.92GiB initial_memory_usage"
        "=3.09GiB peak_torch_memory=3.12GiB memory_usage_post_profile=3.12GiB non_torch_memory=0.47GiB "
        "kv_cache_size=3.54GiB gpu_memory_utilization=0.90\n"
        "INFO 12-06 11:39:36 gpu_executor.py:113] # GPU blocks: 1207, # CPU blocks: 1365\n"
    ) == {
        "weights_bytes": 2.64, "activation_bytes": 0.48, "non_torch_bytes": 0.47, "kv_pool_bytes": 3.54,
        "device_bytes": 7.92, "peak_torch_bytes": 3.12,
    }  # fmt: skip
    wrapped_number = parse_log(
        "INFO 12-25 14:00:28 worker.py:265] Memory profiling results: duration=18.41 seconds, total_gpu_memory=191.98"
        "GiB, \ninitial_memory_usage=71.40GiB, peak_torch_memory=86.79GiB, memory_usage_post_profile=73.77GiB, "
        "non_torch_memory=6\n.07GiB, kv_cache_size=95.28GiB, gpu_memory_utilization=0.98.\n"
    )
    assert wrapped_number.figures["non_torch_bytes"] == pytest.approx(6.07 * GIB)
    assert wrapped_number.figures["kv_pool_bytes"] == pytest.approx(95.28 * GIB)
    found = parse_log(
        "[INFO ] PyProcess - W-210-model-stdout: #033[1;36m(VllmWorkerProcess pid=240)#033[0;0m INFO 02-14 08:23:15 "
        "worker.py:266] model weights take 3.97GiB; non_torch_memory takes 2.10GiB; PyTorch activation peak memory "
        "takes 0.36GiB; the rest of the memory reserved for KV Cache is 29.02GiB.\n"
        "[INFO ] PyProcess - W-210-model-stdout: INFO 02-14 08:23:15 worker.py:266] model weights take 3.96GiB; "
        "non_torch_memory takes 2.00GiB; PyTorch activation peak memory takes 0.36GiB; the rest of the memory "
        "reserved for KV Cache is 29.13GiB.\n"
    )
    assert {rank: round(own.figures["kv_pool_bytes"] / GIB, 2) for rank, own in found.ranks.items()} == {
        "": 29.13, "process 240": 29.02,
    }  # fmt: skip
    found = parse_log(
        "(VllmWorker rank=1 pid=12) INFO 05-01 10:00:00 [gpu_model_runner.py:1] Model loading took 7.5 GiB and 3 s\n"
        "(VllmWorker rank=0 pid=11) INFO 05-01 10:00:00 [gpu_model_runner.py:1] Model loading took 7.6 GiB and 3 s\n"
    )
    assert [*found.ranks] == ["TP0", "TP1"]


def test_log_lines_of_vllm_0_32_and_later_are_read():
    """0.32 logs consumed memory, activations with the graph estimate, and both pool lines in one."""
    start = (
        "(APIServer pid=1) INFO 11-20 10:00:00 [startup.py:18] vLLM server version 0.33.0, serving model org/name\n"
        "(Worker_DP0_TP1_EP1 pid=9) INFO 11-20 10:00:09 [model_runner.py:429] Model loading took 14.96 GiB memory and "
        "3.25 seconds\n"
        "(Worker_DP0_TP1_EP1 pid=9) INFO 11-20 10:00:10 [model_runner.py:6410] Estimated CUDA graph memory: 0.50 GiB "
        "total\n"
        "(Worker_DP0_TP1_EP1 pid=9) INFO 11-20 10:00:11 [gpu_worker.py:952] Free memory on device (78.70/79.18 GiB) on "
        "startup. Desired GPU memory utilization is (0.92, 72.84 GiB). Actual usage is 15.61 GiB for consumed memory "
        "(weights + non-torch), 1.75 GiB for peak activation, and 0.37 GiB for CUDAGraph memory. Replace "
        "gpu_memory_utilization config with `--kv-cache-memory=59000000000` (54.95 GiB) to fit into requested memory\n"
        "(EngineCore_DP0 pid=5) INFO 11-20 10:00:12 [kv_cache_planning.py:2395] GPU KV cache size: 1,142,198 tokens, "
        "Maximum concurrency for 8,192 tokens per request: 139.43x\n"
    )
    found = parse_log(start)
    (rank,) = found.ranks
    assert rank == "DP0_TP1"
    assert found.version == "0.33.0"
    told = {name: round(size / GIB, 2) for name, size in found.ranks[rank].figures.items()}
    assert told["activation_bytes"] == 1.25
    assert told["non_torch_bytes"] == 0.65
    assert (found.figures["tokens"], found.figures["max_concurrency"]) == (1_142_198, 139.43)
    off = "CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it,"
    found = parse_log(f"{start}(Worker_DP0_TP1 pid=9) WARNING 11-20 10:00:11 [gpu_worker.py:671] {off}\n")
    assert found.figures["activation_bytes"] / GIB == pytest.approx(1.75)
    debug = (
        "DEBUG 11-20 10:00:00 [gpu_worker.py:1] Initial free memory: 78.70 GiB; Requested memory: 0.920000 (util), "
        "72.84 GiB\nDEBUG 11-20 10:00:00 [gpu_worker.py:2] Memory profiling takes 9.1 seconds. Total non KV cache "
        "memory: 17.00GiB; torch peak memory increase: 2.0GiB; total consumed (from mem_get_info): 15.75GiB; weights "
        "memory: 14.96GiB.\n"
    )
    assert gib_of(debug) == {
        "requested_bytes": 72.84, "non_kv_bytes": 17.0, "consumed_bytes": 15.75, "weights_bytes": 14.96,
        "non_torch_bytes": 0.79, "activation_bytes": 1.25, "kv_pool_bytes": 55.84,
    }  # fmt: skip


def test_kv_pool_set_by_flag_and_kv_pool_on_a_cpu_are_read_from_logs():
    assert gib_of(
        "INFO 10-01 10:00:00 [gpu_worker.py:242] Initial free memory 78.70 GiB, reserved 20.00GiB memory for KV Cache "
        "as specified by kv_cache_memory_bytes config and skipped memory profiling.\n"
    ) == {"kv_pool_bytes": 20.0}
    found = parse_log(
        "INFO 10-01 10:00:00 [cpu_worker.py:216] Explicitly set (4.0/62.8) GiB for KV cache on node 0.\n"
        "INFO 10-01 10:00:00 [kv_cache_utils.py:1] CPU KV cache size: 182,016 tokens\n"
    )
    assert found.flags["device"] == "cpu"
    assert found.figures["kv_pool_bytes"] == 4 * GIB


def test_nested_values_in_logged_engine_arguments_are_not_read_as_flags():
    found = parse_log(
        "INFO 10-01 10:00:00 [utils.py:233] non-default args: {'model': 'org/name', 'speculative_config': {'model': "
        "'org/draft', 'num_speculative_tokens': 3}, 'hf_overrides': {'rope': [1, 2]}, 'enforce_eager': True, "
        "'served_model_name': ['a, b'], 'max_model_len': 8192}\n"
    )
    assert found.model == "org/name"
    assert found.flags["max_model_len"] == "8192"
    assert found.flags["enforce_eager"] == "True"
    assert "num_speculative_tokens" not in found.flags


def test_figures_are_read_from_the_last_start_in_a_log_with_several_starts():
    one = text_of("meta-llama---h100-80gb--tp1pp1dp1--8192-dtbf16-kvfp8")
    other = text_of("meta-llama-llama-3--h100-80gb--tp1pp1dp1--8192-dtf32")
    found = parse_log(one + other)
    assert found.starts == 2
    assert found.figures == parse_log(other).figures
    assert found.flags["dtype"] == "float32"
    assert found.flags["kv_cache_dtype"] == "auto"


def test_ranks_kv_pools_and_options_are_read_from_an_sglang_log():
    start = (
        "[2026-02-26 16:20:01] server_args=ServerArgs(model_path='org/name', tokenizer_path='org/name', tp_size=2, "
        "dp_size=1, mem_fraction_static=0.85, page_size=64, max_running_requests=48, chunked_prefill_size=4096, "
        "kv_cache_dtype='auto', quantization=None, lora_paths=None, json_model_override_args='{\"a\": 1}')\n"
    )
    for rank, pool in ((1, 20.41), (0, 20.42)):
        start += (
            f"[2026-02-26 16:41:06 TP{rank}] Load weight end. elapsed=6.46 s, type=LlamaForCausalLM, dtype=torch."
            "bfloat16, avail mem=63.48 GB, mem usage=7.55 GB.\n"
            f"[2026-02-26 16:41:06 TP{rank}] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 148717, K size: "
            f"10.20 GB, V size: {pool - 10.2:.2f} GB\n"
            f"[2026-02-26 16:41:06 TP{rank}] Memory pool end. avail mem=17.73 GB\n"
            f"[2026-02-26 16:41:07 TP{rank}] KV Cache is allocated. #tokens: 148717, K size: 2.13 GB, V size: 2.13 GB\n"
            f"[2026-02-26 16:41:08 TP{rank}] Capture target decode CUDA graph end. elapsed=21.39 s, mem usage=1.66 GB\n"
        )
    found = parse_log(start + "[2026-02-26 16:41:30 TP0] The server is fired up and ready to roll!\n")
    assert (found.engine, found.ready) == ("sglang", True)
    assert [*found.ranks] == ["TP0", "TP1"]
    pools = {rank: round(own.figures["kv_pool_bytes"] / GIB, 2) for rank, own in found.ranks.items()}
    assert pools == {"TP0": 20.42, "TP1": 20.41}  # the draft's pool after them is its own
    assert found.figures["tokens"] == 148_717
    assert found.figures["cuda_graph_bytes"] == pytest.approx(1.66 * GIB)
    assert found.flags["tensor_parallel_size"] == "2"
    assert found.flags["max_num_seqs"] == "48"
    assert found.flags["mem_fraction_static"] == "0.85"
    latent = parse_log(
        "[2026-02-26 16:41:18 TP6] KV Cache is allocated. #tokens: 2454421, KV size: 160.63 GB\n"
    )
    assert latent.figures["kv_pool_bytes"] == pytest.approx(160.63 * GIB)
    assert latent.figures["tokens"] == 2_454_421
    hybrid = parse_log(
        "[2026-02-26 16:41:18] Mamba Cache is allocated. max_mamba_cache_size: 64, conv_state size: 0.25GB, ssm_state "
        "size: 4.00GB\n[2026-02-26 16:41:18] KV Cache is allocated. #tokens: 1000, K size: 1.00 GB, V size: 1.00 GB\n"
    )
    assert hybrid.figures["kv_pool_bytes"] == pytest.approx(6.25 * GIB)


def test_kv_pool_of_an_sglang_0_5_23_log_is_read_from_the_line_after_the_graph_capture():
    """0.5.23 logs options as a dict, an upper bound of addresses, and the pool after the graph capture."""
    found = parse_log(
        "[2026-11-02 10:00:00] server_args={'model_path': 'org/name', 'tp_size': 1, 'page_size': 64, 'disable_cuda_graph': "
        "False, 'mem_fraction_static': 0.83, 'speculative_algorithm': None}\n"
        "[2026-11-02 10:00:09] KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 900000, K size: 60.00 GB, V size: "
        "60.00 GB\n"
        "[2026-11-02 10:00:10] Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=21.39 s, mem usage=1.66 GB, "
        "avail mem=50.00 GB.\n"
        "[2026-11-02 10:00:11] Capture draft decode CUDA graph end. elapsed=2.39 s, mem usage=0.20 GB, avail mem=49.80 GB.\n"
        "[2026-11-02 10:00:12] Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 442750, KV size: "
        "54.04 GB, avail mem=9.10 GB\n"
        "[2026-11-02 10:00:12] Post-capture KV sizing: draft KV cache allocated. dtype: torch.bfloat16, #tokens: 442750, KV "
        "size: 1.69 GB\n"
    )
    assert found.model == "org/name"
    assert found.flags["block_size"] == "64"
    assert found.flags["enforce_eager"] == "False"
    assert found.figures["tokens"] == 442_750
    assert found.figures["kv_pool_bytes"] == pytest.approx(54.04 * GIB)
    assert found.figures["cuda_graph_bytes"] == pytest.approx(1.66 * GIB)


def test_buffers_and_memory_table_are_read_from_a_llama_cpp_log():
    found = parse_log(
        "0.00.363.687 I llama_model_loader: loaded meta data with 33 key-value pairs and 291 tensors from m.gguf (v 3)\n"
        "print_info: file size   = 4.33 GiB (4.64 BPW)\n"
        "load_tensors: offloaded 33/33 layers to GPU\n"
        "load_tensors:   CPU_Mapped model buffer size =   281.81 MiB\n"
        "load_tensors:        CUDA0 model buffer size =  4155.99 MiB\n"
        "llama_context: n_seq_max     = 1\n"
        "llama_context: n_ctx         = 16384\n"
        "llama_context: n_ubatch      = 1024\n"
        "llama_kv_cache:      CUDA0 KV buffer size =  2048.00 MiB\n"
        "llama_kv_cache: size = 2048.00 MiB ( 16384 cells,  32 layers,  1/1 seqs), K (f16): 1024.00 MiB, V (f16): "
        "1024.00 MiB\n"
        "llama_context:      CUDA0 compute buffer size =   560.01 MiB\n"
        "main: server is listening on http://127.0.0.1:8080\n"
        "common_memory_breakdown_print: | memory breakdown [MiB] | total   free     self   model   context   compute\n"
        "common_memory_breakdown_print: |   - CUDA1 (RTX 5090)   | 32606 = 1057 + (29365 = 28609 +     397 +     358) +"
        "        2183 |\n"
    )
    assert (found.engine, found.ready, found.model) == ("llama.cpp", True, "m.gguf")
    assert found.figures["max_model_len"] == 16_384
    assert found.flags["max_num_batched_tokens"] == "1024"
    assert found.figures["CUDA0_compute_bytes"] == pytest.approx(560.01 * (1 << 20))
    assert found.figures["CUDA1_KV_bytes"] == 397 * (1 << 20)


def test_log_parser_distinguishes_separate_from_unified_kv_caches_of_llama_cpp():
    """4/4 sequences mean one cache each; 4/1 means one cache for all."""
    size = "llama_kv_cache: size = 180.00 MiB ( {} cells,  30 layers,  4/{} seqs), K (f16): 90.00 MiB, V (f16): 90.00 MiB"
    apart, shared = (parse_log(size.format(*each) + "\n") for each in ((2048, 4), (8192, 1)))
    assert (apart.flags["max_num_seqs"], apart.flags["kv_unified"]) == ("4", "False")
    assert (shared.flags["max_num_seqs"], shared.flags["kv_unified"]) == ("4", "True")
    assert (apart.figures["max_model_len"], shared.figures["max_model_len"]) == (2048, 8192)


def test_log_parser_joins_only_lines_that_were_wrapped():
    lines = [
        "INFO 04-22 01:44:06 [a.py:1] one", "two", "", "three", "0%|   | 0/51", "INFO 04-22 01:44:07 [a.py:2] four"
    ]  # fmt: skip
    assert [*records(lines)] == [
        "INFO 04-22 01:44:06 [a.py:1] onetwo", "three", "0%|   | 0/51", "INFO 04-22 01:44:07 [a.py:2] four",
    ]  # fmt: skip
