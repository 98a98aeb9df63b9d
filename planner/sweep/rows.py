"""The row of a sweep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination of a sweep with its figures; bytes are bytes of one GPU.

    Attributes:
        gpus: number of GPUs.
        usd_per_hour: hourly price of all GPUs, or None if no list has one.
        price_source: the price list.
        refused: why no plan is possible; the other figures are then 0.
        unsupported: why the engine does not run the combination on this GPU, whatever the memory.
        stops: why the start fails although the memory suffices, and what would start.
        notes: where the plan differs from the flags.
        added_bytes: LoRA slots and the draft's weights.
        max_concurrency: sequences of max_model_len tokens that the pool holds.
        least_concurrency: `max_concurrency` if the engine uses the upper bound of its memory.
        sequences: sequences that run at once, of max_model_len tokens or of the first requested length; at most
            --max-num-seqs.
        least_sequences: `sequences` if the engine uses the upper bound of its memory.
        requests: requests of each requested length that run at once.
        requests_held: requests of each requested length that the pool alone would hold.
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
    added_bytes: int = 0
    least_concurrency: float = 0.0
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
        """Return the hourly price of one of `least_sequences`, or None if there is no price or no sequence."""
        if self.usd_per_hour is None or not self.fits or self.least_sequences < 1:
            return None
        return self.usd_per_hour / self.least_sequences

    @property
    def cost(self) -> tuple[int, float]:
        """Return a sort key: rows with a price first, by price, and the others by their memory."""
        if self.usd_per_hour is not None:
            return 0, self.usd_per_hour
        return 1, float(self.gpus * self.total_bytes)
