"""Many plans at once: quantization x KV dtype x ranks x GPU."""
