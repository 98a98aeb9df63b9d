"""Names and descriptions of a disk tier's metrics, one for each field of `DiskCounts`."""

from __future__ import annotations

from dataclasses import fields

from tonnage.cache.disk.counts import DiskCounts

GAUGES = ("size", "used", "blocks", "ready")
METRICS = {
    "size": "Planned bytes of the disk tier's folder.",
    "used": "Bytes of the disk tier's folder.",
    "blocks": "Chunks in the disk tier.",
    "ready": "Whether the chunks from before the start are in the index.",
    "stored": "Chunks written to the disk tier.",
    "dropped": "Chunks not written, because too many were waiting or the disk was full or failed.",
    "left_out": "Chunks not written, because they were not worth their bytes.",
    "evicted": "Chunks removed from the disk tier to make room.",
    "loaded": "Chunks read from the disk tier.",
    "lost": "Chunks that were missing, damaged or not readable and are computed again.",
    "declined": "Requests whose chunks were computed, because reading them from the disk tier was slower.",
    "written_bytes": "Bytes written to the disk tier.",
    "read_bytes": "Bytes read from the disk tier.",
    "write_seconds": "Seconds that threads wrote to the disk tier.",
    "read_seconds": "Seconds that threads read from the disk tier.",
}
assert [each.name for each in fields(DiskCounts)] == list(METRICS)


def metric_name(field: str) -> str:
    """Return the name of the Prometheus metric for a field of `DiskCounts`; a counter's ends in ``_total``."""
    return f"tonnage_tier_{field}" if field in GAUGES else f"tonnage_tier_{field}_total"
