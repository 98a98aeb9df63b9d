"""SGLang's slots of recurrent states, in a pool of their own beside that of tokens: so much of what weights
leave, by --mamba-full-memory-ratio. As many requests run as find slots.

Source: handle_max_mamba_cache and resolve_max_num_reqs in model_executor/model_runner.py (0.5.4),
model_runner_kv_cache_mixin.py (0.5.9, 0.5.15) and mem_cache/kv_cache_configurator.py (0.5.23),
configs/mamba_utils.py; tests/data/oracles/sglang_states.json holds what these functions say.
"""

from __future__ import annotations

from math import prod

from tonnage.planner.engines.version import Version
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture, CacheLayer, StateTensor
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.plans import Failure, Resolved
from tonnage.planner.units import ceil_div

_OLDEST = (0, 5, 4)  # the first read
_PADDED = (0, 5, 23)  # the first read in which the pool's padding slot comes off
_BUFFERED = (0, 5, 15)  # the first read in which snapshots for prefixes have slots of their own by default
_WITHOUT_PREFIXES = 512  # slots in 0.5.4, where nobody asks for a number of requests
# Slots of a running request: MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO, and two to take turns
# (get_mamba_tracking_slots) for classes with "extra_buffer" (_MAMBA_EXTRA_BUFFER_ARCHS in
# arg_groups/overrides.py)
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
_MOST, _LEAST, _PER_LENGTH = 4096, 2048, 512  # resolve_max_num_reqs
_DRAFTED = 48  # where drafts are verified (handle_speculative_decoding)


def slot_bytes(architecture: Architecture, ranks: int) -> int:
    """Bytes of one slot, all layers, on one rank; 0 without states (mamba_cache_per_req)."""
    return sum(_layer_bytes(layer, ranks) for layer in architecture.cache_layers if layer.kind == "state")


def _layer_bytes(layer: CacheLayer, ranks: int) -> int:
    """The convolution's inputs in bfloat16, the matrices in float32 unless the config says mamba_ssm_dtype."""
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
                f"states like {state.name} in SGLang's pools are not known here", field="layer_types"
            )
    return total


def _mixed(conv: StateTensor, matrix: StateTensor, ranks: int) -> int:
    """Of Mamba-2, whose groups are repeated until every rank has one (extra_groups_for_head_shards)."""
    heads, head_size, state = matrix.shape
    columns, channels = conv.shape
    groups = (channels - heads * head_size) // (2 * state)
    if groups % ranks:
        groups = ranks
    return columns * (heads * head_size + 2 * groups * state) // ranks


def check(architecture: Architecture, chosen: Resolved) -> None:
    """Raise UnsupportedArchitecture for what is not known of a model with states."""
    kinds = {layer.kind for layer in architecture.cache_layers}
    if chosen.version < _OLDEST:
        raise UnsupportedArchitecture(
            "SGLang's pools of states are known from 0.5.4 on",
            field="layer_types",
            hint="--engine-version 0.5.23",
        )
    if kinds <= {"state"}:
        raise UnsupportedArchitecture("a model of states alone has no pool of tokens", field="layer_types")
    if "sliding" in kinds or chosen.flags.pipeline_parallel_size > 1:
        raise UnsupportedArchitecture(
            "states beside windows or in pipeline stages are not known of SGLang's pools", field="layer_types"
        )


def slots(rest: int, slot: int, each: int, chosen: Resolved) -> int:
    """Slots of ``slot`` bytes, ``each`` to a request, out of ``rest``, the bytes for states and tokens
    (max_mamba_cache_size). A request whose drafts are verified has a state more for each of their tokens."""
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
    """Tokens of a request that one step verifies, of a single chain of drafts (speculative_num_steps + 1)."""
    return chosen.flags.num_speculative_tokens + 1 if chosen.flags.speculative_model else 0


def apart(count: int, slot: int, each: int, chosen: Resolved) -> int:
    """Bytes of ``count`` slots and of what verification wants beside them."""
    padded = padding(chosen.version)
    verified = min(most_asked(chosen) or count, count // each) + padded
    return (count + padded + verified * verified_tokens(chosen)) * slot


def padding(version: Version) -> int:
    """Slots that hold nobody's state, and come off the budget."""
    return int(version >= _PADDED)


def slots_per_request(architecture: Architecture, chosen: Resolved) -> int:
    """_calculate_mamba_ratio."""
    if not chosen.flags.enable_prefix_caching:
        return 1
    turns = chosen.version >= _BUFFERED and architecture.class_name in _CLASSES
    return _SLOTS + (_TURNS if turns else 0)


def most_asked(chosen: Resolved) -> int | None:
    """--max-running-requests; None: as many as the pool suggests."""
    if chosen.given_max_num_seqs is not None:
        return chosen.given_max_num_seqs
    return _DRAFTED if chosen.flags.speculative_model else None


def most_running(tokens: int, chosen: Resolved, held: int | None) -> int:
    """max_running_requests. ``tokens``: of the pool; ``held``: requests that it has slots for, None: any."""
    most = most_asked(chosen)
    if most is None:
        most = max(min(tokens * _PER_LENGTH // chosen.max_model_len, _MOST), _LEAST)
    if chosen.version >= _PADDED:
        most = min(most, tokens // 2)
    return most if held is None else min(most, held)
