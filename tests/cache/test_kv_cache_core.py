"""The compiled core: salts, allowed prefixes, admission input, laws, eviction."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numba
import numpy as np
import pool_lists
import pytest
import xxhash
from invariants import check_invariants
from kv_calls import commit, extend
from numba.core.registry import cpu_target
from own_hash import xxh64_block

from tonnage.cache.blocks.state import BY_RESET, columns
from tonnage.cache.errors import NoFreeBlocks
from tonnage.cache.eviction.model import CLASSES, LEARNED, LRU, SCORES
from tonnage.cache.laws import sampled as laws
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.cache.prefix.hashing import hash_tokens
from tonnage.cache.prefix.index import evict
from tonnage.cache.prefix.keyed import hash_keyed
from tonnage.cache.replay.trace import read_trace
from tonnage.cache.sequences.steps import wanted_blocks
from tonnage.planner.model.layout import KVGroup, KVLayout

FULL = KVGroup("full", (0,))
SLIDING = KVGroup("sliding", (1,), window=8)


def make(
    *groups: KVGroup, blocks: int = 65, size: int = 4, seqs: int = 8, length: int = 256, **options: object
) -> KVCacheManager:
    layout = KVLayout(groups or (FULL,), size, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)
    return KVCacheManager(
        layout,
        blocks,
        max_num_seqs=seqs,
        max_model_len=length,
        max_num_batched_tokens=length,
        hash_seed=7,
        **options,  # type: ignore[arg-type]
    )


def compute(manager: KVCacheManager, sequence: int, tokens: list[int], **options: object) -> int:
    """Admit and compute a prompt; return the number of its cached tokens."""
    admitted = manager.admit(sequence, tokens, 4, **options)  # type: ignore[arg-type]
    assert isinstance(admitted, Admitted)
    extend(manager, sequence, len(tokens))
    commit(manager, sequence, len(tokens))
    return admitted.cached_tokens


# -- twins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32, 64, 256])
def test_compiled_hash_equals_xxhash(count: int) -> None:
    random_ids = np.random.default_rng(count)
    for _ in range(50):
        tokens = random_ids.integers(0, 2**31, count + 3, dtype=np.int64).astype(np.int32)
        seed = int(random_ids.integers(0, 2**63)) * 2 + 1
        expected = xxh64_block(tokens[3:].data.cast("B"), seed)
        assert int(hash_tokens(tokens, 3, count, np.uint64(seed))) == expected


@pytest.mark.skipif(sys.hash_info.algorithm != "siphash13", reason="this Python hashes bytes otherwise")
def test_keyed_hash_equals_pythons_siphash() -> None:
    random_ids = np.random.default_rng(0)
    messages = [random_ids.integers(0, 2**31, count + 2).astype(np.int32) for count in (0, 1, 2, 7, 16, 256)]
    program = "import sys; print([hash(bytes.fromhex(text)) % 2**64 for text in sys.argv[1:]])"
    out = subprocess.run(
        [sys.executable, "-c", program, *(message.tobytes().hex() for message in messages)],
        env={"PYTHONHASHSEED": "0"},  # CPython then hashes with a key of zeros (Python/pyhash.c)
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    zero = np.uint64(0)
    for message, expected in zip(messages, json.loads(out), strict=True):
        seed = message[:2].view(np.uint64)[0]
        assert int(hash_keyed(message, 2, message.size - 2, seed, zero, zero, 1, 3)) == expected


def test_keyed_hash_equals_the_reference_test_vector_of_siphash() -> None:
    # vector of length 16 with key 00..0f and message 00..0f (vectors.h of the reference implementation)
    words = np.arange(16, dtype=np.uint8).view(np.uint64)
    message = np.arange(16, dtype=np.uint8).view(np.int32)
    assert int(hash_keyed(message, 2, 2, words[0], words[0], words[1], 2, 4)) == 0x3F2ACC7F57C29BDB


TWIN = """
import random, sys
import numpy as np
sys.path[:0] = {folders!r}
from test_kv_cache_core import FULL, SLIDING, make, random_run
print(random_run(make(FULL, SLIDING, blocks=90, length=64), 400))
"""


def random_run(manager: KVCacheManager, calls: int) -> str:
    """Make random calls with a fixed seed; return a digest of every array at the end."""
    pick = random.Random(3)
    live: dict[int, list[int]] = {}
    for number in range(calls):
        choice = pick.random()
        if choice < 0.3 or not live:
            prompt = [1, 2, 3, 4] * pick.randint(1, 6) + pick.choices(range(3), k=pick.randint(1, 9))
            if isinstance(manager.admit(number, prompt, 8, salt=pick.choice(["", "a"])), Admitted):
                extend(manager, number, len(prompt))
                commit(manager, number, len(prompt))
                live[number] = [len(prompt), len(prompt) + 8]
        elif choice < 0.8:
            ids = [i for i, (known, limit) in live.items() if known < limit]
            manager.decode(ids, pick.choices(range(3), k=len(ids)))
            for i in ids:
                live[i][0] += 1
        else:
            chosen = pick.choice(list(live))
            manager.free([chosen])
            del live[chosen]
    assert manager.sample_invariants() is None
    digest = xxhash.xxh64()
    for array in manager.core:
        for field in vars(columns(array)).values() if array.dtype.names else [array]:
            # the two exp() may differ in the last bit
            same = field.round(9) if field.dtype.kind == "f" else field
            digest.update(np.ascontiguousarray(same).tobytes())
    return f"{digest.hexdigest()} {manager.stats().evictions}"


def test_compiled_and_interpreted_block_manager_leave_equal_arrays() -> None:
    compiled = random_run(make(FULL, SLIDING, blocks=90, length=64), 400)
    assert int(compiled.split()[1]) > 50
    here = Path(__file__).parent
    code = TWIN.format(folders=[str(here), str(here.parent / "helpers")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == compiled.split()


def test_change_of_any_module_invalidates_the_cached_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tonnage.cache import ahead, compiled
    from tonnage.cache.sequences import steps

    if not hasattr(steps.leave, "py_func"):  # NUMBA_DISABLE_JIT: there is no machine code
        assert os.environ.get("NUMBA_DISABLE_JIT")
        assert compiled.COMPILER.folder is None
        return
    folder = Path(compiled.__file__).parent
    target = cpu_target.target_context.codegen().magic_tuple()  # the processor, as in numba's own index
    digest = xxhash.xxh3_64(f"{numba.__version__} {target} {folder.absolute()}".encode())
    for path in [Path(compiled.__file__), Path(ahead.__file__), *sorted(folder.rglob("*.py"))]:
        digest.update(path.read_bytes())
    assert compiled.COMPILER.folder is not None
    assert compiled.COMPILER.folder.name == f"compiled-{digest.hexdigest()}"
    assert compiled.COMPILER.folder in Path(steps.leave._cache.cache_path).parents  # type: ignore[attr-defined]

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    module = tmp_path / "sources" / "below" / "module.py"
    module.parent.mkdir(parents=True)
    module.write_text("ONE = 1")
    before = compiled.Compiler(tmp_path / "sources").folder
    assert before is not None
    assert before.is_relative_to(tmp_path / "kept")
    module.write_text("ONE = 2")
    changed = compiled.Compiler(tmp_path / "sources").folder
    assert changed != before
    # Another installation with the same sources must not load this one's machine code.
    for other in ("copied", "linked"):
        twin = tmp_path / other
        shutil.copytree(module.parent.parent, twin) if other == "copied" else twin.symlink_to("sources")
        assert compiled.Compiler(twin).folder not in (changed, None)


def test_cached_machine_code_unused_for_a_month_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tonnage.cache import compiled

    if numba.config.DISABLE_JIT:
        return
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    sources = tmp_path / "module.py"
    sources.write_text("ONE = 1")
    runs = compiled.Compiler(tmp_path)
    assert runs.folder is not None
    assert runs(double)(1) == 2
    names = ("compiled-0123456789abcdef", "compiled-by-others", "models")
    others = [tmp_path / "kept" / name for name in names]
    for folder in others:
        (folder / "below").mkdir(parents=True)
        (folder / "below" / "file").touch()
    month = compiled._UNUSED_SECONDS
    for folder in (runs.folder, *others):
        os.utime(folder, (0, time.time() - month - 60))
    compiled.Compiler(tmp_path)  # the same again: nothing is new, nothing goes, and it is in use
    assert all(folder.exists() for folder in (runs.folder, *others))
    sources.write_text("ONE = 2")
    assert compiled.Compiler(tmp_path).folder != runs.folder
    assert [folder.exists() for folder in (runs.folder, *others)] == [True, False, True, True]

    os.utime(runs.folder, (0, time.time() - month - 60))
    sources.write_text("ONE = 3")
    compiled.Compiler(tmp_path)
    assert not runs.folder.exists()
    assert runs(triple)(1) == 3  # a running process continues and keeps the code that it compiles
    assert runs.kept
    assert [*runs.folder.rglob("*.nbi")]


def double(value: int) -> int:
    return 2 * value


def triple(value: int) -> int:
    return 3 * value


def test_code_is_compiled_at_every_start_if_the_cache_folder_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tonnage.cache.compiled import Compiler

    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "below"))
    compiler = Compiler(tmp_path)
    assert compiler.folder is None
    assert compiler(lambda value: value + 1)(1) == 2


# -- salts -----------------------------------------------------------------------------------------------------


def test_configured_prefix_is_shared_between_cache_salts_and_later_blocks_are_not() -> None:
    manager = make()
    system, question = list(range(10)), [50, 51, 52, 53, 54, 55, 56, 57, 58]
    manager.allow_prefix(system)  # its two whole blocks
    assert compute(manager, 1, system[:8] + question, salt="a") == 0
    assert compute(manager, 2, system[:8] + question, salt="b") == 8
    assert compute(manager, 3, system[:8] + question, salt="a") == 16
    assert compute(manager, 4, system[:8] + question) == 8  # no salt: the shared blocks, not a tenant's
    stats = manager.stats()
    assert (stats.hit_tokens, stats.shared_hit_tokens) == (8 + 16 + 8, 8 + 8 + 8)
    check_invariants(manager)


def test_prompt_shorter_than_the_shared_prefix_is_cached_under_its_own_salt() -> None:
    manager = make()
    manager.allow_prefix(list(range(16)))
    assert compute(manager, 1, list(range(13)), salt="a") == 0
    assert compute(manager, 2, list(range(13)), salt="b") == 0
    assert compute(manager, 3, list(range(17)), salt="b") == 0  # the allowed chain is another one
    assert compute(manager, 4, list(range(17)), salt="c") == 16


def test_longest_of_several_shared_prefixes_applies_to_a_prompt() -> None:
    manager = make()
    manager.allow_prefix(list(range(4)))
    manager.allow_prefix(list(range(8)))
    compute(manager, 1, list(range(12)), salt="a")
    assert compute(manager, 2, list(range(12)), salt="b") == 8


def test_internal_ids_of_cache_salts_are_reused_but_never_shared_by_two_salts() -> None:
    manager = make(blocks=33)
    for number in range(1000):
        compute(manager, number, [1] * 9, salt=f"tenant {number}")
        manager.free([number])
        if number % 97 == 0:
            check_invariants(manager)
    assert len(manager.prefix.salts._salts) < 300
    for number in range(1000, 1003):
        assert compute(manager, number, [1] * 9, salt=f"tenant {number}") == 0


# -- what admission reads --------------------------------------------------------------------------------------


def test_number_of_unshared_blocks_falls_when_another_request_shares_them() -> None:
    manager = make()
    compute(manager, 1, list(range(16)))
    assert manager.running().private.tolist() == manager.running().held.tolist() == [4]
    compute(manager, 2, [*range(12), 99])
    assert manager.running().held.tolist() == [4, 4]
    assert manager.running().private.tolist() == [1, 1]  # three blocks are shared, each has one more
    manager.free([1])
    running = manager.running()
    assert running.held.tolist() == [4]
    assert running.private.tolist() == [1]  # a lower bound: the three blocks were not counted again
    check_invariants(manager)
    manager.free([2])
    compute(manager, 3, [*range(12), 99])
    assert manager.running().private.tolist() == [4]  # cached blocks without a reference


def test_blocks_shared_by_forked_sequences_are_counted_once() -> None:
    manager = make(FULL, SLIDING)
    compute(manager, 1, list(range(18)), n=3)
    manager.fork(1, 2)
    manager.fork(1, 3)
    running = manager.running()
    assert (running.held.tolist(), running.private.tolist(), running.sequences.tolist()) == ([5], [5], [3])
    manager.append([1, 2, 3], [7, 8, 9])
    wanted = np.zeros(3, np.int64)
    wanted_blocks(manager.core, manager.sequences.rows([1, 2, 3]), np.full(3, 19), wanted)
    assert wanted.tolist() == [1, 1, 1]
    assert len(manager.extend([1, 2, 3], [19, 19, 19])) == 4  # two copies in each group
    assert manager.running().held.tolist() == [7]
    manager.free([2])
    assert manager.running().held.tolist() == [6]
    assert manager.running().output.tolist() == [1]
    check_invariants(manager)


def test_extending_sequences_without_enough_free_blocks_raises_and_changes_nothing() -> None:
    manager = make(blocks=9)
    compute(manager, 1, list(range(8)))
    compute(manager, 2, list(range(20, 28)))
    manager.reservations.reserved = 0  # as if admission had reserved blocks that the pool lacks
    compute(manager, 3, list(range(40, 52)))
    before = [array.copy() for array in manager.core]
    manager.append([1, 2, 3], [7, 8, 9])
    with pytest.raises(NoFreeBlocks) as caught:
        manager.extend([1, 2, 3], [9, 9, 13])
    assert caught.value.hint
    after = manager.core
    for name in ("refs", "next", "prev", "node_of", "node_blocks", "kind", "tables", "requests", "heads"):
        index = after._fields.index(name)
        assert (after[index] == before[index]).all(), name


# -- laws ------------------------------------------------------------------------------------------------------


def test_compiled_invariant_check_detects_every_damaged_array() -> None:
    def fresh() -> KVCacheManager:
        manager = make()
        compute(manager, 1, list(range(10)), n=2)
        manager.fork(1, 2)
        compute(manager, 3, list(range(30, 39)))
        manager.free([3])
        assert manager.sample_invariants() is None
        return manager

    def damage(part: str, field: str, at: object, value: int) -> str | None:
        manager = fresh()
        getattr(getattr(manager, part), field)[at] = value
        found = manager.sample_invariants()
        assert manager.violations == 1
        return found

    block = int(fresh().tables[0][0, 0])
    cached = pool_lists.all_cached(fresh().core)
    ends = [block for kind in range(CLASSES) for block in pool_lists.listed(fresh().core, kind)]
    assert damage("core", "refs", block, 1) == "reference counts"
    assert damage("counts", "free", 0, 3) == "conservation"
    assert damage("core", "next", cached[0], cached[0]) == "conservation"
    assert damage("rows", "room", 0, 4) == "tables"
    assert damage("rows", "shared_tail", 0, 0) == "exclusive writes"
    assert damage("core", "node_of", ends[0], 0) == "reachability"
    assert damage("core", "node_of", 0, 5) == "null block"
    assert damage("rows", "published", 0, 1) == "prefix index"
    assert damage("requests", "private", 0, 1) == "reservation"
    assert set(laws.LAWS[1:]) <= {
        line.split("  ")[0] for line in (sys.modules["invariants"].__doc__ or "").splitlines()
    }


# -- eviction --------------------------------------------------------------------------------------------------


class LruModel:
    """A reference LRU cache of prefix blocks; the last block of a prompt is evicted first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.blocks = capacity, OrderedDict[tuple[int, ...], None]()

    def run(self, tokens: list[int], size: int) -> int:
        full = [tuple(tokens[: at + size]) for at in range(0, len(tokens) - size + 1, size)]
        usable = (len(tokens) - 1) // size
        hit = next((at for at, block in enumerate(full[:usable]) if block not in self.blocks), usable)
        for block in reversed(full):
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return hit * size


def prompts(kind: str, count: int) -> list[list[int]]:
    pick = random.Random(kind)
    out = []
    for number in range(count):
        if kind == "loop":  # more than fits, round and round: LRU never hits
            document, blocks = number % 60, 12
        elif kind == "scan":
            document, blocks = (pick.randrange(8), 6) if pick.random() < 0.3 else (1000 + number, 20)
        else:  # popular documents, which LRU keeps well
            document, blocks = int(pick.paretovariate(0.8)) % 300, 8
        out.append([document * 64 + at // 4 for at in range(blocks * 4)] + [pick.randrange(10**6)])
    return out


def hits(manager: KVCacheManager, requests: list[list[int]]) -> list[int]:
    out = []
    for number, tokens in enumerate(requests):
        out.append(compute(manager, number, tokens))
        manager.free([number])
    check_invariants(manager)
    return out


def test_eviction_lru_setting_gives_the_hits_of_a_plain_lru_model() -> None:
    requests = prompts("popular", 600)
    manager, model = make(blocks=201, eviction="lru"), LruModel(200)
    found = hits(manager, requests)
    expected = [model.run(tokens, 4) for tokens in requests]
    assert sum(expected) > 3000
    # The pool has to make room before it computes, the model after: no request is more than one prompt apart.
    assert abs(sum(found) - sum(expected)) <= 0.02 * sum(expected)
    assert manager.model.rule[0] == LRU


@pytest.mark.parametrize("kind", ["loop", "scan", "popular"])
@pytest.mark.parametrize("blocks", [120, 300, 600])
def test_learned_eviction_hits_at_least_as_often_as_lru(kind: str, blocks: int) -> None:
    requests = prompts(kind, 1500)
    lru = sum(hits(make(blocks=blocks, eviction="lru"), requests))
    adaptive = sum(hits(make(blocks=blocks), requests))
    assert adaptive >= 0.99 * lru
    if kind == "loop":
        assert lru == 0
        assert adaptive > 0.15 * blocks / 720 * 1500 * 48  # of what fits


def test_only_the_last_block_of_a_cached_prefix_is_evictable() -> None:
    manager = make()
    compute(manager, 1, list(range(17)))
    manager.free([1])
    compute(manager, 2, [*range(8), 99, 98, 97, 96, 95])
    manager.free([2])
    ends = [block for kind in range(CLASSES) for block in pool_lists.listed(manager.core, kind)]
    assert manager.pool.cached == len(pool_lists.all_cached(manager.core)) == 4 + 1
    assert len(ends) == 2
    evict(manager.core, 4, BY_RESET)  # both branches, from their ends, and half of what they share
    assert compute(manager, 3, list(range(17))) == 4
    check_invariants(manager)


def conversations(count: int) -> list[list[int]]:
    """Return prompts of which a fifth of the first turns continue three times, about 12 requests apart."""
    out: list[list[int]] = []
    due: dict[int, tuple[list[int], int]] = {}
    for number in range(count):
        tokens, turn = due.pop(number, ([], 1))
        tokens = [*tokens, *(1000 + 50 * number + at for at in range(24 if turn == 1 else 8))]
        if turn in (2, 3) or (turn == 1 and number % 2):
            at = number + 12
            while at in due:
                at += 1
            due[at] = (tokens, turn + 1)
        out.append([*tokens, 7])
    return out


def test_learned_eviction_predicts_which_conversation_turns_continue_and_when() -> None:
    requests = conversations(1500)
    lru = sum(hits(make(blocks=60, eviction="lru"), requests))
    manager = make(blocks=60)
    found = sum(hits(manager, requests))
    assert found > 1000
    assert found > 1.2 * lru
    assert manager.model.rule[0] == LEARNED
    first, second, third, fourth = manager.model.factors[0, 0, :4].tolist()
    assert min(second, third) > 1 > max(first, fourth)
    # Its value is highest while its reuse is expected, not immediately and not later.
    density = manager.model.density[0, SCORES // 2]
    assert density.max() > 1.1 * max(density[0], density[-1])


def test_learned_eviction_switches_to_lru_while_lru_has_more_hits() -> None:
    manager = make(blocks=100)
    hits(manager, prompts("popular", 400))
    assert manager.model.rule[0] == LEARNED
    manager.model.scores[0] = (100, 200)
    compute(manager, 1000, [1, 2, 3, 4, 5])
    assert manager.model.rule[0] == LRU
    manager.model.scores[0] = (250, 200)
    compute(manager, 1001, [1, 2, 3, 4, 5])
    assert manager.model.rule[0] == LEARNED


def test_learned_eviction_hits_at_least_as_often_as_lru_on_a_real_trace() -> None:
    path = Path(__file__).parents[1] / "data" / "traces" / "mooncake_conversation_120.jsonl"
    requests = read_trace(path).requests
    size = 16

    def replay(blocks: int, **options: object) -> int:
        manager = make(blocks=blocks, size=size, seqs=4, length=2**17, **options)
        hit = 0
        for number, request in enumerate(requests):
            ids = np.repeat(np.array(request.hash_ids, np.int32), request.hash_block)
            tokens = (ids * 512 + np.arange(len(ids), dtype=np.int32) % 512)[: request.prompt_tokens]
            hit += compute(manager, number, tokens)  # type: ignore[arg-type]
            manager.free([number])
        assert manager.sample_invariants() is None
        return hit

    seen: set[int] = set()
    possible = 0  # whole blocks of the leading pieces that an earlier prompt had, less the last token
    for request in requests:
        ids = request.hash_ids
        assert ids is not None
        pieces = next((at for at, piece in enumerate(ids) if piece not in seen), len(ids))
        possible += min(pieces * 512, (request.prompt_tokens - 1) // size * size)
        seen.update(ids[: request.prompt_tokens // 512])
    assert replay(100_000) == possible > 0
    for blocks in (10_000, 20_000, 40_000):
        assert replay(blocks) >= 0.99 * replay(blocks, eviction="lru")
