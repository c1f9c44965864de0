"""Gradient bounds: their cost, and their effect on training under injected faults."""
