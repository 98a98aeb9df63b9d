"""The model runner: one model, one pool, one forward per step."""

from __future__ import annotations

import numpy as np
import torch

from tonnage.planner.plan import Plan
from tonnage.server.engines.hf.attention import PagedBatch, choose_backend
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.fuse import fuse
from tonnage.server.engines.hf.loading import DTYPES, load_model, storage_bytes
from tonnage.server.engines.hf.pool import PagedPool


class ModelRunner:
    """Owns the weights and the pool. ``weights_bytes`` is measured right after the load, before any forward."""

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
        self.attention, self._step = choose_backend(
            self.pool, query_heads, torch.get_num_threads(), DTYPES[plan.deployment.dtype]
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the K/V of the batch, return logits [L, vocabulary] in float32 for ``batch.logits_at``."""
        if batch.copies:
            self.pool.copy_blocks(
                np.array([copy.src for copy in batch.copies], dtype=np.int64),
                np.array([copy.dst for copy in batch.copies], dtype=np.int64),
            )
        paged = PagedBatch(self._step(batch), self.pool)
        output = self.model(
            input_ids=torch.from_numpy(batch.token_ids)[None].to(self.device),
            position_ids=torch.from_numpy(batch.positions)[None].to(self.device),
            use_cache=False,
            logits_to_keep=torch.from_numpy(batch.logits_at).to(self.device),
            paged_batch=paged,
        )
        self.attention_calls = paged.calls
        return output.logits[0].float()
