"""Models: Megatron-core modules as pipeline stages, with layers, loss, sizes and random streams."""
