"""Everything that harms a run on purpose."""
