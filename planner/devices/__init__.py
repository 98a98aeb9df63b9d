"""Devices for which models are planned: the GPU catalogue, GPU prices, and the local machine."""
