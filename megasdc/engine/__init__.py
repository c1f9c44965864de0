"""The pipeline engine and its hooks."""
