"""Which cached block goes next, and what the pool learns about reuse."""
