"""Optimizer groups and the view of ZeRO-1's gradients and shards."""
