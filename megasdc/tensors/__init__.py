"""Exact bits: checksums of tensors, bit patterns, comparison."""
