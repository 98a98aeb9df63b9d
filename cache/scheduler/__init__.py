"""What a step computes, and who waits for which turn. No clock, no tensors."""
