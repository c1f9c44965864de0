"""Names of metrics, and where they are written."""
