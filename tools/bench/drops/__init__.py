"""DropCompute: its cost, its predicted and measured speed-up, its effect on training."""
