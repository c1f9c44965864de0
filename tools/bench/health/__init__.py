"""Benchmarks of health."""
