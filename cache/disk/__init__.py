"""The second cache tier of engines: KV blocks in a folder on disk, which never exceeds its size limit.

Read in this order: ``block_file`` (one block as a file), ``folder`` (all files and their sizes), ``order`` (the
learned order of eviction), ``store`` (what an engine calls), ``pace`` (whether reading is faster than
computing).
"""

from tonnage.cache.disk.counts import DiskCounts
from tonnage.cache.disk.folder import DiskError
from tonnage.cache.disk.store import DiskStore

__all__ = ["DiskCounts", "DiskError", "DiskStore"]
