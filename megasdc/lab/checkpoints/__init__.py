"""Comparison of checkpoints bit by bit, of manifests with digests, and of parameters over steps."""
