"""Commands and pages of comparisons of checkpoints."""
