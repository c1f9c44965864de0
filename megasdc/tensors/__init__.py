"""Bit patterns, checksums and comparison of tensors, and element-wise gradient bounds."""
