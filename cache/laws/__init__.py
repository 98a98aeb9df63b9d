"""The invariants of the block manager: conditions that must be true after every operation."""
