"""Parallel layout: dims, process groups, small named collectives."""

from megasdc.parallel.dims import ParallelDims

__all__ = ["ParallelDims"]
