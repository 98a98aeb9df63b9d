"""A secondary tier of vLLM's KV offloading: a folder on disk that never exceeds its configured size.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
        "secondary_tiers": [{"type": "tonnage", "module_path": "tonnage.server.engines.vllm.disk_tier",
          "path": "/mnt/kv", "size": "1TiB"}]}}'

vLLM's own tier ``fs`` has no upper bound. vLLM calls all methods of the tier in the scheduler's thread (vLLM
0.32, v1/kv_offload/tiering/base.py). The methods only read an index in memory, and leave files to other
threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tonnage.cache.disk import DiskCounts, DiskStore
from tonnage.cache.disk.files import files_of
from tonnage.cache.disk.metrics import GAUGES, METRICS, metric_name
from tonnage.cache.disk.pace import ReadRule
from tonnage.planner.errors import DeploymentError
from tonnage.planner.units import parse_size

# This logger is a child of the "vllm" logger, because vLLM configures only its own loggers.
log = init_logger(f"vllm.{__name__}")

# Numbers of threads that read and that write. Reads do not queue behind writes, because requests wait for
# reads. More threads do not help a disk whose queue is full, and each thread needs memory for a block.
READERS, WRITERS = 4, 2
# Upper bound of the bytes of blocks that wait to be written. vLLM keeps these blocks in the host tier until
# they are written, so without the bound a slow disk would fill the host tier with them.
WAITING_BYTES = 256 << 20
# Seconds between two reports of the metrics. Prometheus scrapes every few seconds.
REPORT_SECONDS = 0.5
# While reads are pending, the scheduler's thread sleeps this long in each step. Without tokens to compute, vLLM
# runs empty steps in a loop and keeps the interpreter's lock (GIL). A reader needs the lock five times for each
# chunk and would wait 5 ms each time.
YIELD_SECONDS = 5e-5
# A function that reads or writes the chunk with a given key, and returns whether it succeeded.
_Work = Callable[[Any, memoryview], bool]
_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_VALUES = attrgetter(*METRICS)
_EXPORTED = [(metric_name(name), name in GAUGES) for name in METRICS]


@dataclass(frozen=True, slots=True)
class _Ended:
    """A read or write job of the disk tier that has ended.

    Attributes:
        result: Result to report to vLLM.
        read: Whether the job read chunks; False: it wrote chunks.
        waited: Number of the job's chunks that waited in the queue: 0 for a write that was dropped at once,
            else all.
        loaded: Number of chunks that were transferred successfully.
        seconds: Seconds since the job was submitted.
    """

    result: JobResult
    read: bool
    waited: int
    loaded: int
    seconds: float


class _Threads:
    """A pool of threads that runs the disk tier's read or write jobs in the order of their arrival.

    It replaces the executor of `concurrent.futures`, which takes 50 us of the caller's time for each job.
    """

    def __init__(self, count: int, name: str, run: Callable[[TransferJob, float], None]) -> None:
        self._jobs: SimpleQueue[tuple[TransferJob, float] | None] = SimpleQueue()
        self._run, self._closed = run, False
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)]
        for each in self._threads:
            each.start()

    def submit(self, job: TransferJob) -> None:
        """Queue a read or write job, which one of the threads will run."""
        self._jobs.put((job, time.monotonic()))

    def close(self) -> None:
        """End the threads after their current jobs; queued jobs are not run."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for each in self._threads:
            each.join()

    def _work(self) -> None:
        while (found := self._jobs.get()) is not None and not self._closed:
            self._run(*found)


class DiskTier(SecondaryTierManager):
    """A tier of vLLM's KV offloading that stores chunks of KV blocks in a folder of bounded size on disk.

    Args:
        offloading_spec: vLLM's offloading configuration.
        primary_kv_view: Bytes of the host tier, of shape (chunks, bytes of a chunk).
        tier_type: Name of the tier in vLLM's metrics.
        path: Path of the folder. Only one server may write to it.
        size: Upper bound of the folder's size: a text such as "1TiB", or an integer of bytes.
        read_only: Whether this tier only reads the folder, because another server writes to it.
        revision: Revision of the model's weights, if the model's name does not identify it. Blocks of another
            revision are never read.
        waiting: Upper bound of the bytes that wait to be written; further blocks are dropped.
        prefill: Prompt tokens that the engine computes per second, from which the tier decides whether reading
            chunks is faster than computing them. With None, the tier measures how long requests take from a
            miss to their first chunks.
        policy: "learned" or "lru", the order of eviction.
        backpressure_detector: vLLM's own detector of a slow tier.

    Raises:
        DeploymentError: an option is invalid.
        DiskError: the folder cannot be used, or another server writes it.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        size: str | int,
        read_only: bool = False,
        revision: str = "",
        waiting: str | int = WAITING_BYTES,
        prefill: float | None = None,
        policy: str = "learned",
        backpressure_detector: Any = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise DeploymentError(
                f"the disk tier has no option {next(iter(unknown))!r}", field="secondary_tiers",
                hint="it has path, size, read_only, revision, waiting, prefill and policy",
            )  # fmt: skip
        self._rule = ReadRule(None if prefill is None else _tokens_of_chunk(offloading_spec) / _pace(prefill))
        self._most_waiting = parse_size(str(waiting), "waiting")
        more = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        # vLLM 0.30 passes no backpressure detector to a tier, and its base class of tiers accepts none.
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        assert primary_kv_view.strides is not None
        self._chunk: int = primary_kv_view.strides[0]  # size of a chunk in bytes
        mapper = FileMapper.from_offloading_spec(
            root_dir="", offloading_spec=offloading_spec, blocks_per_file=offloading_spec.blocks_per_chunk,
            parallel_agnostic=True,
        )  # fmt: skip
        namespace = mapper.get_run_config() | {
            "rank": mapper.rank, "bytes": self._chunk, "revision": revision,
            "files": files_of(mapper.get_run_config()["model_name"]),
        }  # fmt: skip
        self._store = DiskStore(
            Path(path), parse_size(str(size), "size"), namespace, read_only=_flag(read_only),
            learned=self._chunk if _learned(policy) else None,
        )  # fmt: skip
        self._bytes = primary_kv_view.cast("B")
        # Bytes that wait to be written, and number of jobs (read or write) not yet reported to vLLM as ended.
        self._waiting = self._unfinished = 0
        self._reading = 0  # number of read jobs not yet reported to vLLM as ended
        self._readers = _Threads(READERS, "tonnage-disk-read", self._read)
        self._writers = _Threads(WRITERS, "tonnage-disk-write", self._write)
        self._ended: deque[_Ended] = deque()
        self._report_at = 0.0  # time of the next report of the metrics
        self._reported = _VALUES(DiskCounts(0))
        self._may_read: dict[str, int | None] = {}  # chunks that each request may still read; None: no limit
        self._computed: dict[str, dict[Any, None]] = {}  # chunks that each running request has offloaded.
        # Time of each request's last cache miss; an entry is removed when the request's first chunks are
        # stored.
        self._missed: dict[str, float] = {}

    # -- methods that vLLM calls -----------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Return vLLM's default offloading policy: each chunk is offloaded when it is complete."""
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Return whether the disk tier has a chunk and the measured read times make reading it worthwhile."""
        request = req_context.req_id
        if self._store.contains(key) and self._reads(request):
            return _HIT
        self._missed[request] = time.monotonic()
        return _MISS

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Do nothing, because the order of eviction changes only when requests end."""

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue a store job's chunks to be written to disk, or drop them if too many bytes wait already."""
        count = len(job_metadata.keys)
        size = count * self._chunk
        since = self._missed.pop(job_metadata.req_context.req_id, None)
        # The time that a prompt's first chunks took to compute is known: it began with their cache miss. For
        # later chunks the start time is not known, so they are not measured.
        if since is not None:
            self._rule.computed(count, time.monotonic() - since)
        computed = self._computed.setdefault(job_metadata.req_context.req_id, {})
        computed.update(dict.fromkeys(job_metadata.keys))
        self._unfinished += 1
        if self._waiting and self._waiting + size > self._most_waiting:
            self._store.drop(count)
            self._ended.append(_Ended(JobResult(job_metadata.job_id, success=False), False, 0, 0, 0.0))
            return
        self._waiting += size
        self._store.announce(job_metadata.keys)
        self._writers.submit(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue the chunks of a load job to be read from disk by another thread."""
        self._unfinished += 1
        self._reading += 1
        self._readers.submit(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of the store and load jobs that have ended since the last call."""
        if self._reading:
            time.sleep(YIELD_SECONDS)
        found = []
        while self._ended:
            each = self._ended.popleft()
            self._unfinished -= 1
            self._reading -= each.read
            if not each.read:
                self._waiting -= each.waited * self._chunk
            elif each.loaded:
                self._rule.read(each.loaded, each.seconds)
            found.append(each.result)
        return found

    def on_request_finished(self, req_context: Any) -> None:
        """Record which chunks an ended request used, so that the order of eviction learns from them.

        Chunks that the request found in host memory count, too.
        """
        computed = self._computed.pop(req_context.req_id, {})
        for keys in _groups(req_context, computed):
            self._store.finish(keys, [key for key in keys if key not in computed])
        self._may_read.pop(req_context.req_id, None)
        self._missed.pop(req_context.req_id, None)

    def drain_jobs(self) -> None:
        """Wait until all disk reads and writes in progress or in a queue have ended."""
        while len(self._ended) < self._unfinished:
            time.sleep(0.001)

    def shutdown(self) -> None:
        """End the reader and writer threads and release the folder; queued jobs are not run."""
        self._readers.close()
        self._writers.close()
        self._bytes.release()
        self._store.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the types and descriptions of the tier's Prometheus metrics, ``tonnage_tier_*``."""
        found: dict[str, OffloadingMetricMetadata] = {}
        for name, what in METRICS.items():
            kind = OffloadingGaugeMetadata if name in GAUGES else OffloadingCounterMetadata
            found[metric_name(name)] = kind(documentation=what)
        return found

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the disk tier's gauges, and the increases of its counters since the last report.

        Returns None if the last report is less than `REPORT_SECONDS` old.
        """
        if (time_now := time.monotonic()) < self._report_at:
            return None
        self._report_at = time_now + REPORT_SECONDS
        now, before = _VALUES(self._store.counts()), self._reported
        self._reported = now
        stats = OffloadingConnectorStats()
        for (name, gauge), value, old in zip(_EXPORTED, now, before, strict=True):
            if gauge:
                stats.set_gauge(name, float(value))
            elif value != old:
                stats.increase_counter(name, value - old)
        return stats

    def _reads(self, request: str) -> bool:
        """Return whether a request may read one more chunk from disk.

        How many chunks a request may read is decided once, when its first chunk is found on disk.
        """
        may = self._may_read
        if request not in may:
            may[request] = self._rule.blocks_to_read()
            if may[request] is not None:
                self._store.decline()
        left = may[request]
        if left:
            may[request] = left - 1
        return left != 0

    # -- work of the threads ---------------------------------------------------------------------------------

    def _read(self, job: TransferJob, asked: float) -> None:
        self._run(self._store.load, job, asked)

    def _write(self, job: TransferJob, asked: float) -> None:
        keys = list(job.keys)
        prefix = next(group for group in _groups(job.req_context, keys) if keys[0] in group)
        try:
            worth = self._store.admits(prefix, keys)
            self._run(self._store.store if worth else _leave_out, job, asked)
        finally:
            self._store.settle(keys)

    def _run(self, work: _Work, job: TransferJob, asked: float) -> None:
        """Read or write the chunks of one job on disk; record the job's result even after an exception."""
        since, done, keys = time.monotonic(), [], list(job.keys)
        try:
            for key, chunk in zip(keys, job.chunk_ids.tolist(), strict=True):
                at = chunk * self._chunk
                if work(key, self._bytes[at : at + self._chunk]):
                    done.append(key)
        except Exception:
            log.exception("a job of the disk tier failed")
        now = time.monotonic()
        result = JobResult(
            job.job_id, success=len(done) == len(keys), successful_keys=tuple(done) or None,
            transfer_time=now - since,
        )  # fmt: skip
        self._ended.append(_Ended(result, job.is_promotion, len(keys), len(done), now - asked))


# The configuration names the tier's class in `type` ("tonnage"), and vLLM looks it up in this module.
tonnage = DiskTier


def _groups(req_context: Any, more: Iterable[Any]) -> list[list[Any]]:
    """Return a request's chunk keys, with those in ``more``, as one list in prefix order per KV cache group."""
    groups: dict[bytes, list[Any]] = {}
    # vLLM 0.32 has no public method that lists the chunk keys of a request. A chunk's key ends with the number
    # of its KV cache group (make_offload_key).
    for key in dict.fromkeys([*getattr(req_context, "_offload_key_positions", ()), *more]):
        groups.setdefault(key[-4:], []).append(key)
    return list(groups.values())


def _leave_out(key: Any, chunk: memoryview) -> bool:
    """Return False without writing the chunk; replaces `DiskStore.store` for chunks not worth storing."""
    return False


def _learned(policy: object) -> bool:
    if policy not in ("learned", "lru"):
        raise DeploymentError(f"{policy!r} is neither 'learned' nor 'lru'", field="policy")
    return policy == "learned"


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise DeploymentError(f"{value!r} is not true or false", field="read_only")
    return value


def _pace(prefill: object) -> float:
    if isinstance(prefill, bool) or not isinstance(prefill, int | float) or not 0 < prefill < math.inf:
        raise DeploymentError(f"{prefill!r} is not a positive number of tokens a second", field="prefill")
    return float(prefill)


def _tokens_of_chunk(offloading_spec: Any) -> int:
    """Return the number of tokens in a chunk of KV blocks; if it differs by KV cache group, the smallest."""
    return int(min(offloading_spec.tokens_per_block) * offloading_spec.blocks_per_chunk)
