"""Parallel layout: dims, process groups, small named collectives."""
