"""What a run folder holds, read back: attempts, status, summary."""
