"""Parts of benchmarks/abuse.py."""
