"""Sections of the configuration, one class each; entries of lists in files of their own."""
