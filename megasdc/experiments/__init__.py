"""Sweeps: the experiments of papers as files of runs, repeatable by one command."""
