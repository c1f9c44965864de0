"""Checkpoints: save, resume, manifests, verification, comparison; complete on every node, or absent."""
