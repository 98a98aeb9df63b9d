"""The paged KV block manager: pool, block tables, prefix index, eviction, admission, trace replay; no torch."""
