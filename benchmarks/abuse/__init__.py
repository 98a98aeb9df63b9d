"""Cases, server and measurement of benchmarks/abuse.py."""
