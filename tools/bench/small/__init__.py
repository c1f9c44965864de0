"""Campaigns of small runs: their model and configuration, runs in the ranks of one benchmark, a log to go on from."""
