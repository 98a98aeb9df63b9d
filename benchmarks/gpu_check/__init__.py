"""Steps of benchmarks/gpu_check.py: each compares one part of Tonnage on a device with the plan."""
