"""Sweeps: experiments of papers as files that describe many runs, repeatable by one command."""
