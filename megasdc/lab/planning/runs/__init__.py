"""Planning: which part of the time of a supervised run on many devices is training, and what would raise it."""
