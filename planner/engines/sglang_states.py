"""SGLang's slots of recurrent states, in a pool separate from the token pool.

--mamba-full-memory-ratio is the ratio of the pool of state slots to the token pool, which divide the memory
left beside the weights. The slots limit the number of running requests. The source is handle_max_mamba_cache
and resolve_max_num_reqs in model_executor/model_runner.py (0.5.4), model_runner_kv_cache_mixin.py (0.5.9,
0.5.15), mem_cache/kv_cache_configurator.py (0.5.23) and configs/mamba_utils.py.
tests/data/oracles/sglang_states.json holds outputs of these functions.
"""

from __future__ import annotations

from math import prod

from tonnage.planner.engines.version import Version
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture, CacheLayer, StateTensor
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.plans import Failure, Resolved
from tonnage.planner.units import ceil_div

# Oldest SGLang release whose rules for recurrent states the planner knows.
_OLDEST = (0, 5, 4)
# Oldest SGLang release, of those whose source was read, that reserves a padding slot in the pool of states.
_PADDED = (0, 5, 23)
# Oldest SGLang release, of those whose source was read, that by default has separate slots for the snapshots of
# recurrent states that prefix caching keeps.
_BUFFERED = (0, 5, 15)

# Number of state slots in SGLang before 0.5.9, if prefix caching is off and --max-running-requests is not set.
_WITHOUT_PREFIXES = 512

# A running request has three slots (MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO). Model classes with
# "extra_buffer" (_MAMBA_EXTRA_BUFFER_ARCHS in arg_groups/overrides.py) add two alternating slots
# (get_mamba_tracking_slots).
_SLOTS, _TURNS = 3, 2
_CLASSES = (
    "KimiLinearForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3NextForCausalLM", "BailingMoeV2_5ForCausalLM",
    "BailingMoeV3ForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM",
)  # fmt: skip
TOO_FEW = Failure(
    "no request has slots for its states: a larger --mamba-full-memory-ratio or --mem-fraction-static, or more "
    "ranks, would make some",
    "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests.",
)
_MOST, _LEAST, _PER_LENGTH = 4096, 2048, 512  # limits of max_running_requests in SGLang's resolve_max_num_reqs
_DRAFTED = 48  # default of --max-running-requests with speculative decoding (handle_speculative_decoding)


def slot_bytes(architecture: Architecture, ranks: int) -> int:
    """Return the bytes of one slot of recurrent states on one rank, over all layers (mamba_cache_per_req).

    The result is 0 for a model without recurrent layers.
    """
    return sum(_layer_bytes(layer, ranks) for layer in architecture.cache_layers if layer.kind == "state")


def _layer_bytes(layer: CacheLayer, ranks: int) -> int:
    """Return the bytes of one layer's recurrent states on one rank.

    The inputs of the convolution are bfloat16. The state matrices are float32 unless the config sets
    mamba_ssm_dtype.
    """
    matrix = next((state for state in layer.states if state.name == "ssm" and len(state.shape) == 3), None)
    total = 0
    for state in layer.states:
        if state.name.startswith("conv"):
            total += 2 * (
                ceil_div(prod(state.shape), ranks) if matrix is None else _mixed(state, matrix, ranks)
            )
        elif state.name == "recurrent" or state is matrix:
            dtype = state.dtype if state.name == "recurrent" and state.dtype else "float32"
            total += prod(state.shape) // ranks * DTYPE_BYTES[dtype]
        else:
            raise UnsupportedArchitecture(
                f"the planner does not know SGLang's pool for recurrent states like {state.name}",
                field="layer_types",
            )
    return total


def _mixed(conv: StateTensor, matrix: StateTensor, ranks: int) -> int:
    """Return the number of elements of Mamba-2's convolution state on one rank.

    If the number of ranks does not divide the number of groups of B and C, every rank gets one group
    (extra_groups_for_head_shards).
    """
    heads, head_size, state = matrix.shape
    columns, channels = conv.shape
    groups = (channels - heads * head_size) // (2 * state)
    if groups % ranks:
        groups = ranks
    return columns * (heads * head_size + 2 * groups * state) // ranks


def check(architecture: Architecture, chosen: Resolved) -> None:
    """Raise UnsupportedArchitecture for a model with recurrent states whose SGLang pools are not known."""
    kinds = {layer.kind for layer in architecture.cache_layers}
    if any(layer.compression > 1 for layer in architecture.cache_layers):
        raise UnsupportedArchitecture(
            "the planner does not know SGLang's pools for layers that compress tokens", field="compress_ratios",
            hint="--engine vllm",
        )  # fmt: skip
    if chosen.version < _OLDEST:
        raise UnsupportedArchitecture(
            "the planner knows SGLang's pools of recurrent states from 0.5.4 on",
            field="layer_types",
            hint="--engine-version 0.5.23",
        )
    if kinds <= {"state"}:
        raise UnsupportedArchitecture(
            "the planner does not support SGLang for a model whose layers all have recurrent states",
            field="layer_types",
            hint="--engine vllm",
        )
    if "sliding" in kinds or chosen.flags.pipeline_parallel_size > 1:
        raise UnsupportedArchitecture(
            "the planner does not know SGLang's pools for recurrent states of a model with sliding windows or "
            "pipeline stages",
            field="layer_types",
            hint="--engine vllm",
        )


def slots(rest: int, slot: int, each: int, chosen: Resolved) -> int:
    """Return the number of recurrent-state slots that fit into memory (SGLang's max_mamba_cache_size).

    With speculative decoding, a request needs one more state for each token that a step verifies.

    Args:
        rest: Bytes for states and tokens together.
        slot: Bytes of one slot.
        each: Slots per request.
        chosen: Flags and sizes of the plan.
    """
    flags, given = chosen.flags, chosen.given_max_num_seqs
    if not flags.enable_prefix_caching:
        if given is not None:
            return given
        if chosen.version < (0, 5, 9):
            return _WITHOUT_PREFIXES
    ratio, verified = flags.mamba_full_memory_ratio, verified_tokens(chosen)
    budget = int(rest * ratio / (1 + ratio)) - padding(chosen.version) * slot * (1 + verified)
    return int(max(0, budget) // (slot * (1 + verified / each)))


def verified_tokens(chosen: Resolved) -> int:
    """Return the tokens of one request that a speculative decoding step verifies, 0 without a draft model.

    The number is speculative_num_steps + 1, which holds if the draft proposes a chain of tokens and not a tree.
    """
    return chosen.flags.num_speculative_tokens + 1 if chosen.flags.speculative_model else 0


def apart(count: int, slot: int, each: int, chosen: Resolved) -> int:
    """Return the bytes of a pool of recurrent states: its slots, and the extra states of speculative decoding.

    SGLang has one extra state for each token that a step verifies. ``count`` is the number of slots, ``slot``
    the bytes of one slot, ``each`` the number of slots per request.
    """
    padded = padding(chosen.version)
    verified = min(most_asked(chosen) or count, count // each) + padded
    return (count + padded + verified * verified_tokens(chosen)) * slot


def padding(version: Version) -> int:
    """Return the number of padding slots in the pool of recurrent states, which hold no request's state."""
    return int(version >= _PADDED)


def slots_per_request(architecture: Architecture, chosen: Resolved) -> int:
    """Return the number of recurrent-state slots per running request (SGLang's _calculate_mamba_ratio)."""
    if not chosen.flags.enable_prefix_caching:
        return 1
    turns = chosen.version >= _BUFFERED and architecture.class_name in _CLASSES
    return _SLOTS + (_TURNS if turns else 0)


def most_asked(chosen: Resolved) -> int | None:
    """Return the requested --max-running-requests, or None if SGLang derives it from the token pool."""
    if chosen.given_max_num_seqs is not None:
        return chosen.given_max_num_seqs
    return _DRAFTED if chosen.flags.speculative_model else None


def most_running(tokens: int, chosen: Resolved, held: int | None) -> int:
    """Return SGLang's max_running_requests for a token pool of ``tokens`` tokens.

    ``held`` is the number of requests that the state slots allow; None is unlimited.
    """
    most = most_asked(chosen)
    if most is None:
        most = max(min(tokens * _PER_LENGTH // chosen.max_model_len, _MOST), _LEAST)
    if chosen.version >= _PADDED:
        most = min(most, tokens // 2)
    return most if held is None else min(most, held)
