"""The invariants of the KV block manager: conditions that must be true after every operation."""
