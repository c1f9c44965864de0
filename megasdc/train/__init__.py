"""The training loop: building a run, hooks between steps, start and end of a rank."""
