"""Campaigns of supervised runs between test hosts."""
