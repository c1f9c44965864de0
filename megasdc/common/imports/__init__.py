"""Imports of large libraries: fast, in forks too, and without what they do not need."""
