"""The invariants of the block manager: what must hold after every operation."""
