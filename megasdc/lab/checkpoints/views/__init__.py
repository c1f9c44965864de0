"""Views of checkpoints that only comparisons and inspection need."""
