"""Detection of injected faults, and the cost of traces, checksums and checks."""
