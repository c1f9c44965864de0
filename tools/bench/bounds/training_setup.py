"""Faults and bounds of a run of the campaign on gradient bounds, and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasdc.config.faults import COLLECTIVE
from tools.bench.bounds.options import BoundTrainOptions, Setting
from tools.bench.small.gpt import small_config

REPLICAS = 2
HARMED_REPLICA = 1
HARMED_ELEMENTS = 2


def run_config(
    options: BoundTrainOptions, data: Path, folder: Path, setting: Setting, seed: int, *, faulty: bool
) -> dict[str, Any]:
    """The configuration of one run; the seed is of weights and faults, which a faulty run has on one replica."""
    raw = small_config(
        options.gpt,
        folder,
        options.steps,
        {
            "optimizer_hooks": [] if setting.theta is None else [{"hook": setting.bound, "theta": setting.theta}],
            "faults": fault_specs(options, seed) if faulty else [],
        },
        training={"seed": seed, "eval_interval": options.steps, "eval_samples": options.eval_samples},
        learning_rate=options.learning_rate,
        data=data,
    )
    return raw | ({"bf16": {"enabled": True}} if options.precision == "bf16" else {})


def fault_specs(options: BoundTrainOptions, seed: int) -> list[dict[str, Any]]:
    """Heavy-tailed faults on the gradient that one replica gives to the sum: factors of +-10 to +-10^12.

    Both signs, because a wrong element that keeps its sign points downhill once it is bounded.
    """
    return [
        {
            "phase": COLLECTIVE,
            "replica": HARMED_REPLICA,
            "kind": "scale",
            "factor": sign * 10.0**decade,
            "elements": HARMED_ELEMENTS,
            "probability": probability,
            "seed": seed,
        }
        for decade, probability in options.fault_probabilities.items()
        for sign in (1, -1)
    ]
