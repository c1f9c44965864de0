"""Repeatability of a configuration: known causes of differences, and two runs compared bit by bit."""
