"""Live view of a run: what its folder says now, and how a terminal shows it."""
