"""Distributions of delays: seeded pure functions, shared by simulations and injected delays."""
