"""Versions of Python and of the packages below megasdc: permitted, run, and the private names they must have."""
