"""The devices a model is planned for: the catalogue of GPUs, and this machine."""
