"""Optimizer groups, gradient bounds, and access to ZeRO-1's gradients and shards."""
