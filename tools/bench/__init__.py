"""Benchmarks and campaigns, each with its bar, its machine and its interval: ``python -m tools.bench --help``."""
