"""The process of a rank: start, signals, locks on folders, memory and garbage collection."""
