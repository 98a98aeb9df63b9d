"""Peak of PyTorch's allocations during vLLM's profile run (``profile_run``) on a GPU, besides the weights.

The peak is the largest of three phases:

- the vision tower on the largest images (encoder.py);
- the sampler on the logits of max_num_seqs sequences, while the hidden states of the whole step are alive;
- the widest layer of a step of max_num_batched_tokens tokens.

Two persistent allocations are added to the peak:

- the workspace of the matrix multiplications, up to 0.32. From 0.33 on, vLLM allocates it before its first
  memory snapshot (init_device in gpu_worker.py), so it no longer counts;
- the buffer that the fused experts of all layers share, from 0.13 on.

The rules are from vLLM 0.10 to 0.33 (_dummy_run and _dummy_sampler_run in v1/worker/gpu_model_runner.py,
v1/sample, v1/worker/workspace.py, model_executor/layers/fused_moe). They were compared with
tests/data/startups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tonnage.planner.devices.catalogue import capability_of, is_amd
from tonnage.planner.engines.runtime.estimate import Coefficients
from tonnage.planner.engines.runtime.gpu import has_towers
from tonnage.planner.engines.vllm.encoder import Encoding, encoding
from tonnage.planner.engines.vllm.multimodal import drops_towers
from tonnage.planner.engines.vllm.repack import mxfp4_kernel
from tonnage.planner.engines.vllm.tensors import predicts_tokens
from tonnage.planner.engines.vllm.versions import VersionRules, on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.plans import Resolved
from tonnage.planner.units import MiB

# PyTorch keeps a workspace for cuBLAS: 32 MiB from Hopper on, on older GPUs two buffers of 4 MiB and eight of
# 16 KiB (aten/src/ATen/cuda/CublasHandlePool.cpp, PyTorch 2.5 to 2.13).
_CUBLAS, _CUBLAS_BEFORE_HOPPER = 32 * MiB, 8 * MiB + 128 * 1024
# Inductor's autotuning flushes the L2 cache with a buffer of its size: 50 MiB on an H100
# (torch/_inductor/runtime/benchmarking.py, PyTorch 2.10). For the first pipeline stages of Llama-3.1-8B, vLLM
# 0.19 prints an activation peak of 1.10 GiB. The planned peak is 1.10 GiB with this buffer, 1.05 GiB without.
# Peaks in reports of 0.10.2 match the plan without the buffer (Qwen2.5-3B: 0.17 GiB).
_L2 = 50 * MiB
_TIMED_SINCE = (0, 15, 0)
# The top-k/top-p kernel's buffer has one row per multiprocessor, 132 on an H100
# (v1/sample/ops/topk_topp_triton.py).
_MULTIPROCESSORS = 132
# An MLA prefill expands keys and values of at most this many context tokens at once
# (MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size).
_LATENT_CONTEXT = 64 * 1024
_HOPPER = (9, 0)
# With a draft model, vLLM's V1 model runner also profiles its rejection sampler, with one drafted token per
# sequence. The two numbers count its tensors of shape [sequences, vocabulary]. 3 are in the model's dtype:
# the logits of the drafted token and of the next token, and a copy of the latter. 6 are in float32: the next
# token's returned logits, the drafted token's raw and constrained logits, their probabilities, the exponential
# noise and its reciprocal (_dummy_sampler_run; v1/sample/rejection_sampler.py, 0.17 to 0.32).
_VERIFIER = 3, 6


@dataclass(frozen=True, slots=True)
class ProfilePeak:
    """The memory peaks of vLLM's profile run, in bytes; 0 for a phase that the pipeline stage does not run.

    Attributes:
        forward: Peak of the widest layer of a step.
        sampler: Peak of the sampler.
        workspace: Workspace of matrix multiplications, allocated throughout the run.
        experts: Buffer of the fused experts, allocated after images were encoded.
        encoder: Memory of the vision tower; None if the tower's profile is not known.
    """

    forward: int
    sampler: int
    workspace: int
    experts: int
    encoder: Encoding | None = None

    @property
    def total(self) -> int:
        """Return the total memory peak of vLLM's profile run in bytes."""
        encoded = self.encoder.peak if self.encoder else 0
        return max(max(self.forward, self.sampler) + self.experts, encoded) + self.workspace + self._deep

    @property
    def _deep(self) -> int:
        return self.encoder.deep if self.encoder else 0

    @property
    def formula(self) -> str:
        """Return the formula of the profile run's memory peak with its numbers, as ``--explain`` prints it."""
        kept = f" + buffer of the experts {self.experts:,}" if self.experts else ""
        text = f"max(forward pass {self.forward:,}, sampler {self.sampler:,}){kept}"
        if self.encoder and self.encoder.peak:
            text = f"max({text}, encoder {self.encoder.peak:,})"
        if self._deep:
            text += f" + buffers of what layers are given {self._deep:,}"
        text += f" + workspace of matrix multiplications {self.workspace:,}"
        return text + (f"; encoder: {self.encoder.formula}" if self.encoder and self.encoder.peak else "")


def peak(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> ProfilePeak:
    """Return the memory peak of vLLM's profile run on one rank.

    ``architecture`` is the rank's share of one pipeline stage. ``fitted`` holds the coefficients fitted to
    start-up logs.
    """
    flags, known = chosen.flags, rules(chosen.version)
    size = DTYPE_BYTES[flags.dtype]
    stream = chosen.max_num_batched_tokens * architecture.hidden_size * size
    first, last = _ends(architecture)
    second = on_second_runner(architecture, known)
    # A pooling model returns one vector per text instead of logits (_dummy_pooler_run).
    samples = last and architecture.kind != "encoder" and flags.runner != "pooling"
    # A later stage receives hidden states and residual into its own buffers (make_empty_intermediate_tensors).
    received = 0 if first else 2 * stream
    encoded = encoding(architecture, chosen, first)
    towers = has_towers(architecture) and not drops_towers(architecture, flags, chosen.version)
    if encoded is not None:
        received += encoded.kept
    elif towers and (first or not second):
        received += stream  # the image embeddings of one step stay allocated while the language model runs
    forward = _forward(architecture, chosen)
    if chosen.draft is not None and last:
        # The draft model runs on the same tokens, while the target model's hidden states that it reads are
        # still allocated.
        read = chosen.draft.reads * stream
        forward = max(forward + read, _forward(chosen.draft.part, chosen) + stream + read)
    hopper = (capability_of(flags.gpu) or _HOPPER) >= _HOPPER
    return ProfilePeak(
        forward=forward + received,
        sampler=_sampler(architecture, chosen, known, fitted) + stream + received if samples else 0,
        workspace=0 if known.cublas_first else _CUBLAS if hopper else _CUBLAS_BEFORE_HOPPER,
        experts=_expert_buffer(architecture, chosen) if known.expert_buffer else 0,
        encoder=encoded,
    )


def compiles(chosen: Resolved) -> bool:
    """Return whether torch.compile benchmarks kernels on the GPU when vLLM compiles a model at its first start.

    vLLM sets Inductor's option ``benchmark_combo_kernel`` with PyTorch 2.9 and later (config/compilation.py).
    On AMD GPUs, vLLM runs on nightly builds of PyTorch, so the result is True for every vLLM version that runs
    AMD GPUs on V1.
    """
    known = rules(chosen.version)
    timed = known.times_kernels or (is_amd(chosen.flags.gpu) and known.chunked_on_rocm)
    return timed and not chosen.flags.enforce_eager


def compiling(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes that torch.compile allocates at once in the profile run, 0 if the model is not compiled.

    To benchmark a kernel, Inductor allocates tensors of random values in the shapes of all its arguments
    (get_args in torch/_inductor/codegen/triton.py and triton_combo_kernel.py, 2.10 to 2.13). The kernel with
    the largest argument reads the embedding table. The result is the bytes of a copy of this table, of the
    kernel's output, and of the buffer that flushes the L2 cache. A start that finds the compiled model in its
    cache does not allocate them (vllm-project/vllm issues 54122 and 54383).

    Start-up logs confirm the copy of the embedding table:

    - R9700: with Qwen3-14B-FP8 and gpt-oss-20b, the first start's pool is 1.06 and 0.47 GiB smaller than later
      ones. This function returns 1.12 and 0.64 GiB.
    - Two 4090s with Qwen3-32B-AWQ (vLLM 0.28, pull request 54479): the first pool is 0.47 GiB smaller. The
      table has 0.72 GiB per GPU.
    - Quadro RTX 8000 with Qwen3.8-27B (pull request 518 of 1CatAI/1Cat-vLLM): the peak is 2.59 GiB. The table
      has 2.37 GiB.
    """
    table = max(
        (
            tensor.elements
            for tensor in architecture.tensors
            if tensor.role == "embedding" and tensor.layer is None
        ),
        default=0,
    )
    if not table or not compiles(chosen):
        return 0
    step = chosen.max_num_batched_tokens * architecture.hidden_size
    return (table + step) * DTYPE_BYTES[chosen.flags.dtype] + _L2


def _ends(architecture: Architecture) -> tuple[bool, bool]:
    """Return whether the pipeline stage has the token embedding, and whether it has the output head."""
    outside = [tensor.role for tensor in architecture.tensors if tensor.layer is None]
    return "embedding" in outside, "head" in outside or "norm" in outside


def _sampler(architecture: Architecture, chosen: Resolved, known: VersionRules, fitted: Coefficients) -> int:
    """Return the bytes of the sampler in the profile run.

    The sampler holds the logits in the model's dtype, the hidden states that it samples from, and random values
    in a tensor of the same shape. It also holds three float32 tensors of the logits' shape: a copy of the
    logits, the probabilities and the exponential noise. Logs of a float32 model (2.21 GiB) confirm this.
    FlashInfer's kernel on logits needs as many bytes, because of its masked logits. A draft model adds the
    tensors of vLLM's rejection sampler (``_VERIFIER``).
    """
    rows = min(chosen.max_num_seqs, chosen.max_num_batched_tokens)
    size, vocabulary = DTYPE_BYTES[chosen.flags.dtype], architecture.vocab_size
    sampled = 2 * rows * architecture.hidden_size * size
    if on_second_runner(architecture, known):
        # The V2 model runner's dummy requests have no sampling parameters, so its sampler copies nothing
        # (v1/worker/gpu/sample/sampler.py).
        return rows * vocabulary * size + sampled
    drafts = chosen.draft is not None
    if known.sampler == "sort":
        return sorting(architecture, chosen, fitted) + (rows * vocabulary * 2 * (size + 4) if drafts else 0)
    triton = (known.sampler == "triton" or drafts) and rows >= 8
    buffer = min(_MULTIPROCESSORS, rows) * vocabulary * 4 if triton else 0
    if drafts:
        return rows * vocabulary * (_VERIFIER[0] * size + _VERIFIER[1] * 4) + sampled + buffer
    if known.sampler == "probabilities":  # FlashInfer's kernel needs float32 logits and probabilities
        return rows * vocabulary * (size + 2 * 4) + sampled
    return rows * vocabulary * (size + 3 * 4) + sampled + buffer


def sorting(architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> int:
    """Return the bytes that vLLM's sampler (up to 0.16) needs to sort the logits."""
    rows = min(chosen.max_num_seqs, chosen.max_num_batched_tokens)
    return int(rows * architecture.vocab_size * fitted.sampler_sort)


def unsorted(peak: ProfilePeak, architecture: Architecture, chosen: Resolved, fitted: Coefficients) -> int:
    """Return the bytes that the profile run's peak saves if FlashInfer's sampler replaces vLLM's sort.

    FlashInfer's kernel masks float32 logits and computes probabilities from them
    (top_k_top_p_sampling_from_logits).
    """
    rows = min(chosen.max_num_seqs, chosen.max_num_batched_tokens)
    size = DTYPE_BYTES[chosen.flags.dtype]
    kept = rows * (architecture.vocab_size * (size + 3 * 4) + 2 * architecture.hidden_size * size)
    saved = max(0, sorting(architecture, chosen, fitted) - kept)
    return peak.total - replace(peak, sampler=max(0, peak.sampler - saved)).total


def _forward(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of the tensors that are alive at the peak of a layer's forward pass.

    Per token, the tensors of the MLP are gate, up and their product. Those of the attention are the projected
    and rotated queries, keys and values, the attention's output, the residual and the projected output.
    """
    flags, ranks = chosen.flags, chosen.flags.tensor_parallel_size
    size, tokens = DTYPE_BYTES[flags.dtype], chosen.max_num_batched_tokens
    # A masked LM computes logits of every token. vLLM copies them to float32 for pooling.
    if predicts_tokens(architecture):
        return tokens * architecture.vocab_size * (size + 4)
    q = architecture.heads * architecture.head_size // ranks
    kv = max(1, architecture.kv_heads // ranks) * architecture.head_size
    around = 2 * architecture.hidden_size + 3 * q + 3 * kv
    mlp = _widest(architecture, "mlp") // architecture.hidden_size
    moments = [tokens * (around + mlp) * size]
    latents = [layer for layer in architecture.cache_layers if layer.kind == "mla"]
    if latents and architecture.rotary is not None:
        # For MLA, the profile run also allocates the buffers of a prefill with a long context (forward_impl in
        # mla_attention.py).
        seqs = chosen.max_num_seqs * chosen.block_size
        context = max(min(max(8 * chosen.max_model_len, 4 * seqs), _LATENT_CONTEXT), seqs)
        value = latents[0].value_head_size or architecture.head_size
        expanded = architecture.heads // ranks * (architecture.head_size - architecture.rotary.dim + value)
        moments.append((tokens * around + context * expanded) * size)
    timed = _L2 if not flags.enforce_eager and chosen.version >= _TIMED_SINCE else 0
    return max(moments) + timed


def _expert_buffer(architecture: Architecture, chosen: Resolved) -> int:
    """Return the bytes of the persistent buffer that the fused experts of all layers share.

    Per token and selected expert, it holds max(inner, hidden) and max(2 x inner, hidden) values, where inner is
    an expert's width (workspace_shapes of the Triton, Marlin, CUTLASS and DeepGEMM experts). MXFP4's Triton
    kernel on Hopper allocates its own memory.
    """
    flags = chosen.flags
    inside = flags.quantization == "mxfp4" and mxfp4_kernel(flags) in ("triton", "rocm")
    if not architecture.experts_per_token or inside:
        return 0
    hidden = architecture.hidden_size
    held = architecture.experts
    if flags.enable_expert_parallel:
        held = max(1, held // (flags.tensor_parallel_size * flags.data_parallel_size))
    matrices = 3 if architecture.gated_mlp else 2
    inner = _widest(architecture, "expert") // (held * hidden * matrices)
    if not inner:
        return 0
    tokens = min(chosen.max_num_batched_tokens, rules(chosen.version).expert_chunk)
    each = max(inner, hidden) + max((matrices - 1) * inner, hidden)
    return tokens * architecture.experts_per_token * each * DTYPE_BYTES[flags.dtype]


def _widest(architecture: Architecture, role: str) -> int:
    """Return the elements of a layer's matrices with ``role``, for the layer that has the most."""
    layers: Counter[int] = Counter()
    for tensor in architecture.tensors:
        is_matrix = len(tensor.shape) >= (3 if role == "expert" else 2)
        if tensor.role == role and tensor.layer is not None and is_matrix:
            layers[tensor.layer] += tensor.elements
    return max(layers.values(), default=0)
