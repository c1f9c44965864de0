"""Configuration of a run, one JSON file: typed sections, loading, overrides, checks; imports no torch."""
