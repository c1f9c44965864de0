"""Comparison of traces: command and pages."""
