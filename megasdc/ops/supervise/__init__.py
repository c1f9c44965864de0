"""Unattended runs: what has happened, what follows from it, and the next attempt."""
