"""Stress test of hosts: repeated collectives, matrix products and a small training run; a verdict for each host."""
