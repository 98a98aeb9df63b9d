"""The manager's verbs for one sequence: batches of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tonnage.cache.manager import BlockCopy, KVCacheManager


def extend(manager: KVCacheManager, sequence_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
    return manager.extend([sequence_id], [num_tokens])


def append(manager: KVCacheManager, sequence_id: int, token_ids: Sequence[int] | Any) -> None:
    manager.append([sequence_id], np.asarray(token_ids, np.int64).reshape(1, -1))


def commit(manager: KVCacheManager, sequence_id: int, num_computed: int) -> None:
    manager.commit([sequence_id], [num_computed])
