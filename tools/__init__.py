"""Scripts over files, and benchmarks; not installed."""
