"""Campaigns of small runs: their model and configuration, runs and launches in the ranks of one benchmark, drills."""
