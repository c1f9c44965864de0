"""Numbers that the papers published."""
