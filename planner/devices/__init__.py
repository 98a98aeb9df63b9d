"""Devices that a model is planned for: the catalogue of GPUs with their prices, and the local machine."""
