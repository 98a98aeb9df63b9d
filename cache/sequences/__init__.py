"""The live sequences: block tables and tokens, and their changes by a step, a fork and an end."""
