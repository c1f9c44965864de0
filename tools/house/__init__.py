"""Measurements of the package's structure, the same before and after files move: ``python -m tools.house --help``."""
