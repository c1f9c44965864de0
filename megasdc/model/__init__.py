"""Megatron-core modules as pipeline stages: layers, loss, sizes, random streams."""
