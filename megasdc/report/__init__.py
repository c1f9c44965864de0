"""Show what a run came to."""
