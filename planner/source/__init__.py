"""Resolution of a model's name: the demo, a folder, a GGUF file, the hub's local cache or the hub."""
