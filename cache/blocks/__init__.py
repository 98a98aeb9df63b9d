"""Blocks, rows and requests: who holds what, and what a step does to it. Arrays of ints and compiled loops."""
