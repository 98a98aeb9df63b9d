"""The block pool and the arrays that hold the whole state of the block manager."""
