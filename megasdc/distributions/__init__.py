"""Distributions of delays: seeded pure functions, shared by simulations and injected delays."""

from megasdc.distributions.kinds import BLOCK_REPLICAS, KINDS, Delay, Place
from megasdc.distributions.trace import load_latencies
from megasdc.lab.planning.environment import Environment, parse_delay

__all__ = ["BLOCK_REPLICAS", "KINDS", "Delay", "Environment", "Place", "load_latencies", "parse_delay"]
