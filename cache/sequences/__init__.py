"""The live sequences: their rows, and what a step, a fork and an end do to them."""
