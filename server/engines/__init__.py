"""Inference engines behind one async interface (base.py): hf (a child process), vllm, and fake (for tests)."""
