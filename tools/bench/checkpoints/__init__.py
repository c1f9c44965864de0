"""Comparison of checkpoints and of manifests: speed and memory."""
