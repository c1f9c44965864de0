"""Archiving the checkpoints of a run while it trains."""
