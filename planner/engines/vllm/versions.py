"""vLLM's rules by version: a table with one row for each release that changed a planned figure.

A new version of vLLM gets a new row, empty if nothing changed. The last row is the newest version with known
rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.version import Version, parse_version
from tonnage.planner.model.architecture import Architecture


@dataclass(frozen=True, slots=True)
class VersionRules:
    """The memory rules and flag defaults that differ between vLLM versions.

    The default values are the rules of vLLM 0.7.
    """

    # Devices that have larger batch defaults: "hopper" is H100 and H200, "memory" all devices of 70 GiB and
    # more.
    large_batches: Literal["", "hopper", "memory"] = ""
    many_sequences: bool = False  # the default of max_num_seqs is 1,024 on every GPU
    chunks_prompts: bool = False  # chunked prefill is on by default (V1)
    hybrid_groups: bool = False  # sliding layers keep only their window
    chunked_on_rocm: bool = False  # AMD GPUs run on V1, with chunked prefill
    huge_batches: bool = False  # devices of at least 160 GiB have even larger batch defaults

    # How the profile run computes top-k and top-p: "sort" sorts the logits; "probabilities" uses FlashInfer's
    # kernel on probabilities if FlashInfer is installed (as in vLLM's image); "triton" uses one Triton kernel
    # with a buffer; "flashinfer" uses FlashInfer's kernel on logits.
    sampler: Literal["sort", "probabilities", "triton", "flashinfer"] = "sort"
    # Whether vLLM samples with FlashInfer's kernel on logits instead of sorting them, if FlashInfer is
    # installed (as in vLLM's image).
    unsorted_if_installed: bool = False
    # Model classes that run on the V2 model runner (v1/worker/gpu), ("*",) for all classes. runner_v2_dense
    # is whether all dense models without recurrent states run on the V2 model runner.
    runner_v2: tuple[str, ...] = ()
    runner_v2_dense: bool = False
    runner_v2_encodes: bool = False  # the V2 runner's profile run encodes images too
    drops_towers: bool = False  # towers are not loaded if the limits of all their modalities are zero

    # Processors pass pixels as bytes, and the GPU converts them to the model's dtype.
    pixels_as_bytes: bool = False
    # vLLM counts a video of Qwen3-VL as 12.5 times its embeddings, to allow for the text of its time stamps.
    formatted_videos: bool = False
    # The profile run copies the embeddings of each image or video into a larger tensor: of the encoder's whole
    # budget ("budget"), or of the tokens counted for the item ("item").
    padded_embeddings: Literal["", "budget", "item"] = ""
    pixtral_mask: bool = True  # Pixtral's attention has a mask over all patches of a batch
    expert_buffer: bool = False  # fused experts of all layers share a persistent buffer
    expert_chunk: int = 16 * 1024  # maximum tokens per call of the fused experts' kernels

    # Backend of FlashInfer's all-reduce fused with the norm after it, on Hopper and Blackwell; "" without one.
    fused_all_reduce: Literal["", "trtllm", "mnnvl"] = ""
    fused_alone: bool = False  # all-reduce fusion is off with pipeline and data parallelism
    torch_2_8: bool = False  # vLLM's PyTorch is 2.8 or later

    # Compilation at the first start benchmarks kernels with copies of their arguments (PyTorch 2.10 and later).
    times_kernels: bool = False
    # How vLLM computes the logged tokens of the pool: "blocks" is num_blocks // groups x smallest block size,
    # "concurrency" is maximum concurrency x max_model_len.
    token_line: Literal["blocks", "concurrency"] = "blocks"
    # Before vLLM sizes the pool, it captures some CUDA graphs to estimate the memory of all graphs.
    graphs_estimated: bool = False
    # vLLM captures CUDA graphs to estimate their memory. The memory that stays allocated after this capture
    # counts as non-torch memory.
    graphs_within_profile: bool = False

    # NCCL and the buffers of custom all-reduce are set up after the first memory snapshot.
    late_communicators: bool = True
    counts_context: bool = False  # CUDA's context and NCCL's communicators are subtracted from the pool
    counts_consumed: bool = False  # memory allocated before the profile run is subtracted from the pool
    graphs_subtracted: bool = False  # the estimate of CUDA graphs is subtracted from the pool
    runner_v2_graphs: bool = False  # the V2 runner's graphs are subtracted from the pool too
    sized_workspace: bool = False  # FlashInfer's attention workspace grows with max_num_batched_tokens
    default_utilization: float = 0.9
    in_flight_batches: int = 1  # number of batches in flight; sliding layers hold the tokens of all of them
    hybrid_prefix_caching: bool = False  # prefix caching is on by default for models with recurrent states
    every_state: bool = False  # prefix caching keeps a Mamba state for each block of a prompt

    # Valid value of --mamba-cache-mode that keeps the most states; "inert" means that the flag has no effect.
    cache_mode: Literal["all", "align", "inert"] = "all"
    prefill_checkpoint: bool = False  # Mamba-2 keeps a state of the prefill beside the running one
    cpu_states: bool = False  # hybrid models with recurrent states run on a CPU, not only on GPUs
    cpu_latents: bool = False  # MLA runs on a CPU
    sliding_kernel_block: bool = False  # sliding layers use the smallest block of their kernel
    padded_pages: bool = False  # attention pages that do not divide the largest page are padded to its size
    cublas_first: bool = False  # cuBLAS is set up before the first memory snapshot, so vLLM does not count it
    draft_limits: bool = False  # the draft model's maximum length limits every sequence

    # The planner knows this version's cache rules of DeepSeek-V4, whose layers compress tokens.
    compressed_cache: bool = False
    marlin_beyond_hopper: bool = False  # MXFP4 experts use Marlin's kernel on GPUs from SM110 on

    # The sparse indexer's wk (key projection) and weights_proj are merged into one 16-bit matrix, whatever the
    # quantization format.
    fused_index_key: bool = False
    stored_kv_dtype: bool = False  # --kv-cache-dtype auto follows the checkpoint's cache dtype
    sparse_default_fp8: bool = False  # DeepSeek-V3.2's cache is fp8_ds_mla by default

    # On SM10x, FlashInfer's backend for sparse MLA stores fp8 latents as plain fp8, not as fp8_ds_mla.
    sparse_flashinfer: bool = False
    glm_sparse_fp8: bool = False  # GLM-5's cache is fp8 by default on SM10x
    same_kv_dtype: bool = False  # a 16-bit cache must have the model's own dtype

    # An M-RoPE table has one row per token of max_model_len instead of four, if no position exceeds the length.
    one_mrope_length: bool = False
    one_hot_positions: bool = True  # Gemma 4's tower multiplies one-hot positions instead of looking them up
    gemma4_batches: bool = False  # Gemma 4's images are encoded in batches
    draft_graphs: bool = False  # the default largest CUDA graph grows with the drafted tokens per sequence
    step_graph: bool = False  # a step of max_num_batched_tokens has a CUDA graph, up to the largest graph size
    wide_graphs: bool = False  # CUDA graphs have up to 1,024 tokens on SM10x
    uniform_graphs: bool = False  # steps that verify draft tokens have CUDA graphs of their own sizes


_V2_MOE = ("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM")
# Entries of (first version, changed rules), in ascending order of version. Their comments name the sources.
_CHANGES: tuple[tuple[Version, dict[str, Any]], ...] = (
    # vLLM's V1 engine is the default from this version on (release notes of 0.8.0). Sources in 0.8.2:
    # _set_default_args_v1 in engine/arg_utils.py, TopKTopPSampler in v1/sample/ops/topk_topp_sampler.py,
    # determine_available_memory in v1/worker/gpu_worker.py.
    (
        (0, 8, 0),
        {
            "chunks_prompts": True,
            "large_batches": "hopper",
            "many_sequences": True,
            "sampler": "probabilities",
            "counts_context": True,
        },
    ),
    # From this version on, vLLM does not sample with FlashInfer if its version is 0.2.3 or later.
    ((0, 8, 3), {"sampler": "sort"}),
    # The default of 1,024 sequences was removed by vLLM's pull request 16158.
    ((0, 8, 4), {"many_sequences": False}),
    # vLLM's pull request 17885 extends the batch defaults of H100 and H200 to devices of 70 GiB and more.
    ((0, 9, 0), {"large_batches": "memory"}),
    # Since vLLM's pull request 18974, memory_profiling counts only memory after the first snapshot.
    ((0, 9, 1), {"counts_context": False}),
    # V1 has a hybrid KV cache manager from this version on.
    ((0, 9, 2), {"hybrid_groups": True}),
    # AMD GPUs ran on vLLM's V0 engine before (reports of 0.9.2 on an MI300X in tests/data/field_reports.jsonl).
    # Source of `unsorted_if_installed`: TopKTopPSampler in v1/sample/ops/topk_topp_sampler.py of 0.10.0,
    # 0.10.1.1, 0.10.2 and 0.11.0 (VLLM_USE_FLASHINFER_SAMPLER is not False); 0.11.1 requires that the variable
    # is set.
    ((0, 10, 0), {"chunked_on_rocm": True, "unsorted_if_installed": True}),
    # Before 0.11.0, VLLM_FUSED_MOE_CHUNK_SIZE in envs.py was 32,768. `expert_chunk` is the later value for
    # every version, because the planner uses it only from 0.13.0 on (`expert_buffer`). Source of
    # `sparse_default_fp8`: pull request 25988, a cherry-pick of 0.11.0 that a later release reverted. Source of
    # `marlin_beyond_hopper`: get_mxfp4_backend in model_executor/layers/quantization/mxfp4.py (not in 0.10.2).
    # Source of `formatted_videos`: get_max_video_tokens in model_executor/models/qwen3_vl.py of 0.11.0, 0.12.0
    # and 0.13.0. Source of `padded_embeddings`: profile_run in v1/worker/gpu_model_runner.py of the same
    # releases. Source of `late_communicators`: init_device in v1/worker/gpu_worker.py of 0.10.2 and 0.11.0.
    (
        (0, 11, 0),
        {
            "torch_2_8": True,
            "sparse_default_fp8": True,
            "marlin_beyond_hopper": True,
            "formatted_videos": True,
            "padded_embeddings": "budget",
            "late_communicators": False,
        },
    ),
    ((0, 11, 1), {"sparse_default_fp8": False, "unsorted_if_installed": False}),
    ((0, 12, 0), {"padded_embeddings": "item"}),
    # Source of `expert_buffer`: v1/worker/workspace.py first appears in the sources of 0.13.0. Source of
    # `draft_graphs`, `step_graph`, `wide_graphs` and `uniform_graphs` (this row and later ones):
    # _set_cudagraph_sizes in config/vllm.py of 0.13.0, 0.20.2, 0.28.0 and 0.29.0.
    (
        (0, 13, 0),
        {"expert_buffer": True, "draft_graphs": True, "formatted_videos": False, "padded_embeddings": ""},
    ),
    # In 0.9.2 to 0.13, an MI300X (192 GiB) had the batch defaults of devices with 70 GiB.
    ((0, 14, 0), {"huge_batches": True}),
    # Source of `drops_towers`: _mark_tower_model in models/interfaces.py is in 0.15.1's wheel, and not in
    # 0.14.1's.
    ((0, 15, 0), {"drops_towers": True}),
    # Source of `times_kernels`: this version requires PyTorch 2.10. With PyTorch 2.9.0, compilation copies no
    # arguments: first starts of 0.12.0, on six kinds of NVIDIA GPUs, have pools that are not reduced by a copy
    # of the embedding table (tests/data/startups/published.jsonl).
    ((0, 16, 0), {"times_kernels": True}),
    # Source of `sampler`: v1/sample/ops/topk_topp_triton.py first appears in 0.17.0; starts of 0.16.0 and
    # 0.17.0 in tests/data/startups have 5.64 and 2.23 GiB of activations. Source of `fused_all_reduce`:
    # enable_allreduce_rms_fusion in config/vllm.py first appears in 0.17.0.
    ((0, 17, 0), {"sampler": "triton", "fused_all_reduce": "trtllm", "fused_alone": True}),
    # Source of `graphs_estimated`: profile_cudagraph_memory first appears in 0.18.0. Source of `expert_chunk`:
    # 0.18.0 has no VLLM_FUSED_MOE_CHUNK_SIZE, so experts process a whole step at once.
    ((0, 18, 0), {"graphs_estimated": True, "graphs_within_profile": True, "expert_chunk": 1 << 40}),
    # Source of `sparse_flashinfer`: vLLM's pull request 37252 (March 2026).
    ((0, 19, 0), {"sparse_flashinfer": True}),
    # Source of `graphs_subtracted` and `default_utilization`: vLLM's pull request 38284, envs.py and
    # config/cache.py of 0.19.0 and 0.20.0. Source of `every_state`: MambaModelConfig in
    # model_executor/models/config.py of 0.20.1 (not known for older versions). Source of `fused_index_key`:
    # wk_weights_proj in model_executor/models/deepseek_v2.py of 0.20.1, which 0.19.0 lacks.
    (
        (0, 20, 0),
        {
            "graphs_subtracted": True,
            "default_utilization": 0.92,
            "every_state": True,
            "step_graph": True,
            "fused_index_key": True,
        },
    ),
    # Source of `token_line`: vLLM's pull request 38364; _report_kv_cache_config in v1/core/kv_cache_utils.py of
    # 0.20.0 and 0.20.1.
    ((0, 20, 1), {"token_line": "concurrency"}),
    # Source of `sampler`: VLLM_USE_FLASHINFER_SAMPLER is on in envs.py. Source of `fused_alone`: all-reduce is
    # fused with pipeline and data parallelism too. Source of `cpu_states`: update_block_size_for_backend in
    # platforms/cpu.py.
    ((0, 21, 0), {"sampler": "flashinfer", "fused_alone": False, "cpu_states": True}),
    # Source of `runner_v2` (this row and later ones): DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES and
    # use_v2_model_runner in config/vllm.py. Source of `gemma4_batches`: _encoder_chunk in
    # model_executor/models/gemma4_mm.py of 0.22.1, which 0.21.0 lacks.
    ((0, 22, 0), {"runner_v2": ("Qwen3ForCausalLM",), "gemma4_batches": True}),
    # Source of `padded_pages`: unify_kv_cache_spec_page_size in v1/core/kv_cache_utils.py.
    (
        (0, 24, 0),
        {
            "runner_v2": (*_V2_MOE, "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
            "padded_pages": True,
            # Since transformers' pull request 46176, merged before this release (June 2026), Gemma 4's tower
            # looks positions up instead of multiplying one-hot positions.
            "one_hot_positions": False,
        },
    ),
    # Source of `fused_all_reduce`: _resolve_fi_ar_backend of 0.24.0 and 0.25.1. Source of
    # `sliding_kernel_block`: _largest_kernel_block_within in model_executor/layers/attention/attention.py of
    # 0.24.0, 0.25.1, 0.29.0, 0.30.0.
    (
        (0, 25, 0),
        {
            "runner_v2": _V2_MOE,
            "runner_v2_dense": True,
            "fused_all_reduce": "mnnvl",
            "sliding_kernel_block": True,
        },
    ),
    # Source of `in_flight_batches`: vLLM's pull request 47728 (July 2026; not yet in 0.25.1's logs). Source of
    # `sized_workspace`: _get_workspace_buffer in v1/attention/backends/flashinfer.py of 0.25.1 and 0.26.0.
    ((0, 26, 0), {"in_flight_batches": 2, "sized_workspace": True}),
    # Source of `graphs_within_profile` and `counts_consumed`: worker/gpu_worker.py, and total_consumed in
    # utils/mem_utils.py, which first appears in 0.27.0. Source of `runner_v2_encodes`: profile_run in
    # v1/worker/gpu/model_runner.py.
    ((0, 27, 0), {"graphs_within_profile": False, "counts_consumed": True, "runner_v2_encodes": True}),
    # Source of `hybrid_prefix_caching`: pull request 50991 (August 2026; off in 0.25.1's logs, on in 0.32.0),
    # default_prefix_caching in engine/arg_utils.py. Source of `every_state`: "align" instead of "all" in
    # MambaModelConfig (model_executor/models/config.py). Source of `pixels_as_bytes`: mm_device_do_normalize in
    # config/multimodal.py.
    (
        (0, 28, 0),
        {"hybrid_prefix_caching": True, "every_state": False, "pixels_as_bytes": True, "wide_graphs": True},
    ),
    # Source of `cpu_latents`: v1/attention/backends/mla/prefill/cpu_sdpa.py. Source of `pixtral_mask`:
    # models/pixtral.py. Source of `runner_v2_graphs`: profile_cudagraph_memory in
    # v1/worker/gpu/cudagraph_utils.py, which returns 0 in 0.28 (pull request 53306).
    (
        (0, 29, 0),
        {
            "runner_v2": ("*",),
            "cpu_latents": True,
            "pixtral_mask": False,
            "runner_v2_graphs": True,
            "uniform_graphs": True,
        },
    ),
    # Source of `stored_kv_dtype`: resolve_kv_cache_dtype_string in utils/torch_utils.py of 0.30 (older:
    # unknown). Source of `sliding_kernel_block`: model_executor/layers/attention/attention.py of 0.30. Source
    # of `compressed_cache`: models/deepseek_v4 runs on a CPU from 0.30 on, with the rules of 0.32
    # (tests/data/oracles/vllm_versions.json).
    ((0, 30, 0), {"stored_kv_dtype": True, "sliding_kernel_block": False, "compressed_cache": True}),
    # Source of `glm_sparse_fp8`: GlmMoeDsaForCausalLM in model_executor/models/config.py (not in 0.31). Source
    # of `prefill_checkpoint`: num_prefill_checkpoint_blocks in model_executor/layers/mamba/mamba_mixer2.py.
    # Source of `one_mrope_length`: mrope_positions_factor in models/qwen3_vl.py (pull request 44738 measured
    # four times the length for Qwen3-VL in June 2026). Source of `cache_mode`: MambaCacheMode in
    # config/cache.py.
    (
        (0, 32, 0),
        {
            "glm_sparse_fp8": True,
            "prefill_checkpoint": True,
            "one_mrope_length": True,
            "cache_mode": "align",
        },
    ),
    # Source of `same_kv_dtype` and `draft_limits`: _reject_mismatched_float_kv_cache and
    # _limit_max_model_len_to_draft in config/vllm.py. Source of `cublas_first`: init_device in
    # v1/worker/gpu_worker.py. get_batch_defaults in engine/arg_utils.py was read too. The pool's rules moved to
    # v1/core/kv_cache_planning.py without a change.
    (
        (0, 33, 0),
        {
            "same_kv_dtype": True,
            "cublas_first": True,
            "draft_limits": True,
            "cache_mode": "inert",
        },
    ),
)
OLDEST = (0, 5, 4)  # version of the oldest log in tests/data/field_reports.jsonl
NEWEST = _CHANGES[-1][0]


def releases() -> list[str]:
    """Return the vLLM releases that changed a memory rule or a flag's default, newest first."""
    return [".".join(map(str, since)) for since, _ in reversed(_CHANGES)]


@cache
def rules(version: Version) -> VersionRules:
    """Return the memory rules and flag defaults of vLLM ``version``."""
    found = VersionRules()
    for since, changed in _CHANGES:
        if version >= since:
            found = replace(found, **changed)
    return found


def version_of(flags: Deployment) -> Version:
    """Return the vLLM version of a deployment, the newest known one if none is given."""
    return NEWEST if flags.engine_version is None else parse_version(flags.engine_version)


def on_second_runner(architecture: Architecture, known: VersionRules) -> bool:
    """Return whether vLLM runs the model on its V2 model runner (v1/worker/gpu) instead of the V1 runner.

    The rule is _is_default_v2_model_runner_model in config/vllm.py.
    """
    if architecture.class_name in known.runner_v2 or known.runner_v2 == ("*",):
        return True
    plain = not architecture.experts and all(layer.kind != "state" for layer in architecture.cache_layers)
    return known.runner_v2_dense and plain


# Name of a rule in VersionRules -> what its change means for a user who upgrades vLLM. The text of a rule that
# one release introduced and a later one removed describes both changes.
_WORDS: dict[str, str] = {
    "large_batches": "H100 and H200 (from 0.9 on all devices of 70 GiB and more) have larger batch defaults: "
    "1,024 sequences, 8,192 tokens",
    "chunks_prompts": "V1: chunked prefill is the default",
    "hybrid_groups": "sliding layers no longer keep every token, because they have KV cache groups of their "
    "own",
    "chunked_on_rocm": "AMD GPUs run on V1, with chunked prefill",
    "huge_batches": "devices of 160 GiB and more have larger batch defaults",
    "sampler": "the profile run's sampler takes a different number of bytes per logit",
    "unsorted_if_installed": "FlashInfer samples if it is installed, or only on request",
    "runner_v2": "the second model runner runs more models (until 0.29 it does not estimate CUDA graphs)",
    "runner_v2_dense": "the second model runner runs dense models",
    "runner_v2_encodes": "the profile run of the second model runner also encodes images",
    "drops_towers": "towers are not loaded if --limit-mm-per-prompt sets all their modalities to zero",
    "pixels_as_bytes": "processors pass images as bytes",
    "gemma4_batches": "Gemma 4's images are encoded in batches",
    "one_hot_positions": "Gemma 4 looks up positions instead of multiplying one-hot vectors",
    "formatted_videos": "the profile run of Qwen3-VL encodes a video (0.11, 0.12), or an image",
    "padded_embeddings": "the profile run pads the embeddings of images and videos, or no longer does",
    "pixtral_mask": "Pixtral's tower has no mask over all patches",
    "expert_buffer": "experts of all layers share a buffer",
    "expert_chunk": "the size of the chunks in which experts process a step has changed",
    "fused_all_reduce": "all-reduce is fused with the norm after it, in a workspace",
    "fused_alone": "the fusion of all-reduce with pipeline and data parallelism has changed",
    "torch_2_8": "PyTorch 2.8",
    "times_kernels": "a first start has a smaller pool, because compilation copies the embedding",
    "token_line": "the printed tokens count requests of max_model_len instead of one group's blocks: hybrids "
    "and sliding windows print other numbers for the same pool",
    "graphs_estimated": "CUDA graphs are captured on trial before the pool is sized",
    "draft_graphs": "the largest CUDA graph grows with the tokens that a draft proposes",
    "step_graph": "a step of --max-num-batched-tokens has a CUDA graph of its own if it is small enough",
    "wide_graphs": "CUDA graphs have up to 1,024 tokens on data centre GPUs with Blackwell",
    "uniform_graphs": "decode steps have CUDA graphs of their own sizes",
    "graphs_within_profile": "memory left by the trial capture counts as non-torch memory, or no longer does",
    "counts_consumed": "memory that the runner allocates before the profile run comes off the pool",
    "many_sequences": "1,024 sequences are the default on every GPU and in the profile run's sampler (V1), or "
    "256 again on most GPUs",
    "late_communicators": "NCCL's buffers precede the first memory snapshot and do not come off the pool",
    "counts_context": "CUDA's context and NCCL's communicators come off the pool, or no longer do",
    "graphs_subtracted": "the estimate of the CUDA graphs comes off the pool "
    "(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 turns it off)",
    "runner_v2_graphs": "the second model runner estimates its CUDA graphs and subtracts them from the pool",
    "sized_workspace": "FlashInfer's workspace holds 16 bytes for each value of a step's queries and counts "
    "as CUDA graphs (a smaller --max-num-batched-tokens makes it smaller)",
    "default_utilization": "--gpu-memory-utilization is 0.92 by default",
    "in_flight_batches": "sliding layers hold the tokens of two batches in flight (asynchronous scheduling)",
    "hybrid_prefix_caching": "prefix caching of hybrids with states is on by default, and keeps states for it",
    "every_state": "prefix caching keeps a Mamba state for each block of a prompt (--mamba-cache-mode all), "
    "or only the running one and the last whole block's (align)",
    "cache_mode": "--mamba-cache-mode all is removed (0.32), or the flag has no effect because prefix caching "
    "decides (0.33)",
    "cpu_states": "hybrids with states run on a CPU",
    "cpu_latents": "latent attention runs on a CPU",
    "sliding_kernel_block": "sliding layers use the smallest block of their kernel, or no longer do",
    "padded_pages": "pages of attention that do not divide the largest are padded",
    "cublas_first": "cuBLAS's handles and workspace are allocated before the first memory measurement and no "
    "longer come off the pool",
    "draft_limits": "the draft model's maximum length limits max_model_len",
    "prefill_checkpoint": "Mamba-2 keeps a state of the prefill beside the running one",
    "compressed_cache": "the cache of layers that compress tokens is planned by this version's rules",
    "stored_kv_dtype": "--kv-cache-dtype auto follows the checkpoint's cache dtype",
    "marlin_beyond_hopper": "MXFP4 experts use Marlin's kernel on consumer GPUs with Blackwell and on GB10",
    "fused_index_key": "the sparse indexer's key projection of FP8 checkpoints is held in 16 bits",
    "sparse_default_fp8": "the cache of sparse latent attention is fp8 by default, or no longer is",
    "sparse_flashinfer": "FlashInfer stores fp8 sparse latents on SM10x",
    "glm_sparse_fp8": "GLM-5's cache is fp8 by default on SM10x",
    "one_mrope_length": "rotary tables are a quarter as long for models whose positions cannot exceed the "
    "token count",
    "same_kv_dtype": "a 16-bit cache must have the model's own dtype",
}


def changes(since: Version, until: Version) -> tuple[tuple[Version, tuple[str, ...]], ...]:
    """Return the vLLM releases after ``since`` up to ``until``, each with descriptions of its changes."""
    return tuple(
        (version, tuple(_WORDS.get(name, name.replace("_", " ")) for name in changed))
        for version, changed in _CHANGES
        if since < version <= until
    )
