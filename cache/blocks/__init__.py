"""The pool of KV blocks, and the arrays that hold the whole state of the block manager."""
