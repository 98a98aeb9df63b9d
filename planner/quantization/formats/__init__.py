"""Quantization formats, one file per quantization tool; `quantization/read.py` documents a file's contents."""
