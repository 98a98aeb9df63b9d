"""Where a model comes from: the demo, a folder, a GGUF file, the hub's cache or the hub."""
