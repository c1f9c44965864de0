"""Local-SGD: whole runs that train apart, and average their weights every few steps."""
