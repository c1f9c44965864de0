"""Studies: comparison of an unhealthy replica with a healthy one, and the consequences for training."""
