"""Campaigns of hangs: who is named, and how fast a stuck run ends."""
