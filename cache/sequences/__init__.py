"""The live sequences' block tables and tokens, and how a step, a fork and an end change them."""
