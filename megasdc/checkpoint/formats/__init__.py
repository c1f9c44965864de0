"""Formats of checkpoint files: where tensors lie in them, read range by range; pickles are checked before loading."""
