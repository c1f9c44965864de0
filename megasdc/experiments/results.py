"""Address under which ``read_sweep`` was documented first; it is ``megasdc.read_sweep``."""

from megasdc.lab.sweeps.results import read_sweep

__all__ = ["read_sweep"]
