"""Health of a run: what every rank is doing, who is stuck, and how a stuck run ends."""
