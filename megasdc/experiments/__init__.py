"""Address under which ``read_sweep`` was documented first."""
