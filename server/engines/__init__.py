"""Engines behind one async protocol (base.py): hf (a child process), vllm, fake (tests)."""
