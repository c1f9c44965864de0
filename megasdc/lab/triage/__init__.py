"""What a step of a run was trained on, and what went wrong in it."""
