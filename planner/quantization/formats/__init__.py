"""Quantization formats, one file per tool that writes them; `quantization/read.py` says what a file defines."""
