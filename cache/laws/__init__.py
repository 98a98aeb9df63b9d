"""The laws of the block manager: what holds after every operation."""
