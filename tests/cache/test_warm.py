"""After compile_manager nothing is left to compile, so that no request waits for a compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Run in a new process, because another test may have compiled the functions already.
SCRIPT = """
import gc, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.warm import compile_manager
from tonnage.planner.model.layout import KVGroup, KVLayout

layout = KVLayout({groups}, 16, 1, 1, 8, "float32", 4)
policy = {policy}
compile_manager(layout, policy)

def signatures():
    return {{
        f.py_func.__qualname__: len(f.signatures)
        for f in gc.get_objects()
        if isinstance(f, Dispatcher) and f.py_func.__module__.startswith("tonnage.cache")
    }}

before = signatures()
assert sum(before.values()) >= 8, before
manager = KVCacheManager(
    layout, 300, max_num_seqs=8, max_model_len=256, max_num_batched_tokens=128, policy=policy
)
rng = np.random.default_rng(0)
live = {{}}
for step in range(400):
    sequence = 2 * step
    tokens = rng.integers(0, 9, int(rng.choice([41, 81, 121]))).astype(np.int32)
    if len(live) < 6 and type(manager.admit(sequence, tokens, 40, n=2)).__name__ == "Admitted":
        manager.grant([sequence], [len(tokens)])
        manager.extend([sequence], [len(tokens)])
        manager.commit([sequence], [len(tokens)])
        manager.fork(sequence, sequence + 1)
        live[sequence] = live[sequence + 1] = len(tokens)
    ids = list(live)
    if ids:
        manager.append(ids, [int(t) for t in rng.integers(0, 9, len(ids))])
        live = {{each: length + 1 for each, length in live.items()}}
        manager.grant(ids, list(live.values()))
        manager.extend(ids, list(live.values()))
        manager.commit(ids, list(live.values()))
        rows = np.array([manager.row(each) for each in ids])
        if step % 3 == 0 and not any(length % 40 == 0 for length in live.values()):
            manager.decode(ids, [7] * len(ids))
            live = {{each: length + 1 for each, length in live.items()}}
        manager.slot_mapping(0, rows, np.arange(len(ids)))
        manager.running(), manager.stats()
    for each in ids:
        if rng.random() < 0.1 or live[each] % 40 == 0:
            manager.free([each])
            del live[each]
assert manager.stats().evictions > 0, manager.stats()
assert manager.sample_invariants() is None
after = signatures()
assert after == before, {{name: n for name, n in after.items() if n != before.get(name)}}
"""

FULL = 'KVGroup("full", (0,))'
SLIDING = 'KVGroup("sliding", (1,), window=32)'


@pytest.mark.parametrize("groups", [f"({FULL},)", f"({FULL}, {SLIDING})"], ids=["full", "full and sliding"])
@pytest.mark.parametrize("policy", ["None", "Policy(AdmissionMode.PREDICTIVE)"])
def test_no_request_compiles_code_after_the_warm_up(groups: str, policy: str) -> None:
    script = SCRIPT.format(groups=groups, policy=policy)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
