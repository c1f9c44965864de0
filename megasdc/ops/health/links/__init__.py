"""Links between hosts: how they are measured, and which are slow."""
