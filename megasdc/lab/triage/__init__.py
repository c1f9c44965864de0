"""What a step of a run was trained on, what went wrong in it, and drills of what would."""
