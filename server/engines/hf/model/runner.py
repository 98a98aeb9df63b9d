"""The model runner, which holds one model and one KV pool, and computes one forward per step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from tonnage.planner.plans import Plan
from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.hf.attention.interface import PagedBatch, candidates
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.model.fuse import fuse
from tonnage.server.engines.hf.model.head import HeadOnly
from tonnage.server.engines.hf.model.layers import fuse_layers
from tonnage.server.engines.hf.model.loading import DTYPES, load_model, storage_bytes
from tonnage.server.engines.hf.pool import PagedPool, on_device

log = logging.getLogger(__name__)


class ModelRunner:
    """A model and its KV pool; ``weights_bytes`` is measured after the load, before any forward."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        layout = plan.kv_cache.layout
        self.device = torch.device(plan.deployment.device)
        self.model = load_model(plan)
        self.weights_bytes = storage_bytes(self.model)
        self.pool = PagedPool(layout, plan.kv_cache.num_blocks, self.device)
        self.fused = fuse(self.model)
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        query_heads: int = self.model.config.get_text_config().num_attention_heads
        threads = torch.get_num_threads()
        self._candidates = candidates(
            self.pool, query_heads, threads, DTYPES[plan.deployment.dtype], limits_of(plan)
        )
        if self._candidates[0].name == "in place":
            self.fused["layer"] = fuse_layers(self.model, layout, query_heads, threads)
        self.next_attention()

    def next_attention(self, why: str = "") -> bool:
        """Switch to the next implementation of attention that loads; return False if none is left.

        ``why`` is the reason to log, such as a failed self-check. It is empty at the first call.
        """
        while self._candidates:
            chosen = self._candidates.pop(0)
            if why:
                log.warning("attention: %s; trying %s", why, chosen.name)
            try:
                self._step = chosen.load()
            except Exception as error:
                # A broken installation may raise any error. The last candidate, the reference implementation,
                # always loads.
                why = f"{chosen.name} does not load ({type(error).__name__}: {error})"
                continue
            self.attention = chosen.name
            return True
        return False

    @torch.inference_mode()
    def forward_in_parts(self, batch: Batch) -> Iterator[torch.Tensor]:
        """Compute ``batch`` as `forward` does, and yield its logits in order, some rows at a time.

        Each yielded tensor has at most max_num_seqs rows. It may have more while its logits have no more values
        than the hidden states of max_num_batched_tokens tokens. If the model's output layer cannot be computed
        alone, the whole model is computed once for each tensor.
        """
        limits = limits_of(self.plan)
        hidden = limits.max_num_batched_tokens * self.model.config.get_text_config().hidden_size
        size = max(limits.max_num_seqs, hidden // self.vocab_size)
        parts = [batch.logits_at[at : at + size] for at in range(0, len(batch.logits_at), size)]
        with HeadOnly(self.model, len(batch.token_ids)) as head:
            yield self.forward(replace(batch, logits_at=parts[0] if parts else batch.logits_at))
            for part in parts[1:]:
                logits = head(on_device(part, self.device))
                yield self.forward(replace(batch, logits_at=part, copies=())) if logits is None else logits

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Write K and V of the batch to the pool; return the logits [L, vocabulary] for ``batch.logits_at``."""
        if batch.copies:
            self.pool.copy_blocks(
                np.array([copy.src for copy in batch.copies], dtype=np.int64),
                np.array([copy.dst for copy in batch.copies], dtype=np.int64),
            )
        paged = PagedBatch(self._step(batch), self.pool)
        output = self.model(
            input_ids=on_device(batch.token_ids, self.device)[None],
            position_ids=on_device(batch.positions, self.device)[None],
            use_cache=False,
            logits_to_keep=on_device(batch.logits_at, self.device),
            paged_batch=paged,
        )
        self.attention_calls = paged.calls
        logits: torch.Tensor = output.logits[0]
        return logits
