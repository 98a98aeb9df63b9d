"""Arithmetic: config -> tensors -> bytes -> capacity. Imports no torch, transformers or numpy."""
