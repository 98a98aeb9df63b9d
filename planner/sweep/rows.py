"""SweepRow: the plan of one combination of flag values in a sweep, which is one row of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination of flag values in a sweep, with the numbers of its plan; sizes are bytes of one GPU.

    Attributes:
        gpus: number of GPUs: tensor-parallel ranks of all pipeline stages.
        stages: number of pipeline stages. The bytes of weights, runtime and free memory are those of one GPU in
            the fullest stage.
        usd_per_hour: hourly price of all GPUs, or None if no list has one.
        price_source: name and date of the price list.
        refused: the reason why no plan is possible, else empty. Without a plan all numbers are 0.
        unsupported: the reason, other than memory, why the engine does not run the combination on this GPU;
            else empty.
        stops: the reason why the engine's start fails although the memory suffices, with a remedy; else empty.
        notes: notes on flag values that the plan changed.
        added_bytes: bytes of LoRA slots and of the speculative draft's weights.
        max_concurrency: sequences of max_model_len tokens that the KV pool holds.
        least_concurrency: lower bound of `max_concurrency`, for the case that all other memory is at its upper
            bound.
        sequences: sequences that run at once, of max_model_len tokens or of the first requested length; at most
            --max-num-seqs.
        least_sequences: lower bound of `sequences`, for the case that all other memory is at its upper bound.
        requests: for each requested length, the number of requests that run at once.
        requests_held: for each requested length, the number of requests that the KV pool could hold if
            --max-num-seqs had no limit.
        least_held: lower bound of the sequences that the KV pool could hold if --max-num-seqs had no limit.
        request_bytes: KV cache bytes of one request of the first requested length, or of one sequence of
            max_model_len tokens.
        read_bytes: KV cache bytes that a decode step reads for one such request or sequence in the middle of
            its output. With several pipeline stages, `request_bytes` and `read_bytes` are sums over one GPU of
            each stage.
        replica_pool_bytes: sum of the KV pool bytes of all GPUs of a replica.
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
    least_held: float = 0.0
    request_bytes: int = 0
    read_bytes: int = 0
    stages: int = 1
    replica_pool_bytes: int = 0

    @property
    def tensor(self) -> int:
        """Return the number of tensor-parallel ranks of one pipeline stage."""
        return self.gpus // self.stages

    @property
    def usd_per_sequence(self) -> float | None:
        """Return USD per hour divided by the sequences that certainly run; None without price or sequences."""
        if self.usd_per_hour is None or not self.fits or self.least_sequences < 1:
            return None
        return self.usd_per_hour / self.least_sequences

    @property
    def cost(self) -> tuple[int, float]:
        """Return a sweep row's sort key: rows with a price first, by price; others by total GPU memory."""
        if self.usd_per_hour is not None:
            return 0, self.usd_per_hour
        return 1, float(self.gpus * self.total_bytes)
