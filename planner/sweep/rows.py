"""A row of a sweep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination. Bytes are of one GPU; ``usd_per_hour`` of all of them, None where no list has a price
    (``price_source`` says which has). ``refused``: why there is no plan (the other figures are 0 then);
    ``unsupported``: why the engine does not run it on that GPU, or not by itself, whatever the memory;
    ``stops``: why its start fails although the memory would do, and what would start. ``notes``: where the
    plan is not what the flags say.

    ``sequences``: of max_model_len tokens, or of the first of the lengths asked for, that run at once, at most
    --max-num-seqs; ``least_sequences``: where the engine takes the most memory it may. ``requests``: of each of
    these lengths, ``requests_held``: what the pool alone would hold of them. ``usd_per_sequence``: for an hour
    of one of ``least_sequences``.
    """

    gpu: str
    gpus: int
    quantization: str
    kv_cache_dtype: str
    fits: bool
    weights_bytes: int = 0
    kv_pool_bytes: int = 0
    runtime_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    tokens: int = 0
    max_concurrency: float = 0.0
    usd_per_hour: float | None = None
    refused: str = ""
    added_bytes: int = 0  # LoRA slots and the draft's weights
    least_concurrency: float = 0.0  # ``max_concurrency`` where the engine takes the most it may
    model: str = ""
    unsupported: str = ""
    max_model_len: int = 0
    max_num_seqs: int = 0
    sequences: float = 0.0
    least_sequences: float = 0.0
    requests: tuple[int, ...] = ()
    requests_held: tuple[int, ...] = ()
    price_source: str = ""
    stops: str = ""
    notes: tuple[str, ...] = ()

    @property
    def usd_per_sequence(self) -> float | None:
        """None without a price, and where not one sequence is certain."""
        if self.usd_per_hour is None or not self.fits or self.least_sequences < 1:
            return None
        return self.usd_per_hour / self.least_sequences

    @property
    def cost(self) -> tuple[int, float]:
        """Priced offers first, the cheapest first; the others by their memory."""
        if self.usd_per_hour is not None:
            return 0, self.usd_per_hour
        return 1, float(self.gpus * self.total_bytes)
