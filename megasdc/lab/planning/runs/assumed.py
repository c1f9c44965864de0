"""What the planning of a run assumes where nothing is given, measured or published; your own figures are better."""

from __future__ import annotations

from megasdc.lab.planning.checkpoints.job import ASSUMED as ASSUMED_COSTS
from megasdc.lab.planning.checkpoints.rates import CORRUPTION, HANG, HOST, NETWORK, SOFTWARE, STORAGE

DETECTION_S = {HOST: 20.0, NETWORK: 20.0, SOFTWARE: 5.0, HANG: 120.0, STORAGE: 5.0, CORRUPTION: 5.0}
"""Seconds from a failure to the end of its attempt. Those of ranks that die are seconds; a host that is cut off was
named 18 s after at limits of 15 s (`health`, test hosts); corruption counts from the check that finds it."""
REPLACED = {HOST: 1.0, NETWORK: 0.0, SOFTWARE: 0.0, HANG: 0.0, STORAGE: 1.0, CORRUPTION: 1.0}
"""Share of failures after which a host is replaced: the first decision of the supervisor, but for disks."""
ASSUMED: dict[str, float] = ASSUMED_COSTS | {
    "repair_hours": 24.0,
    "deciding_s": 1.0,
    "start_per_host_s": 0.0,
    "audit_steps": 50,
    "audit_coverage": 0.9,
    "step_coverage": 0.0,
    "audit_cost": 0.019,  # measured on CPUs: 0.038 % of the time with an audit every 50 steps
}
"""Further figures by name."""
