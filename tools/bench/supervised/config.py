"""Configuration of the runs of a campaign: a tiny model, saves in memory and on the disk, quick limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.campaign import Layout
from tools.bench.small.drill import write_drill
from tools.bench.supervised.faults import INJECTED, KINDS, POISON, SKIPPED
from tools.bench.supervised.target import Target

STEPS, STEP_S = 60, 0.1


@dataclass(frozen=True)
class Training:
    """What decides the bits of a run without a fault.

    Args:
        layout: tensor, pipeline, data.
        audited: results are compared every few steps, in which all replicas train on the same samples.
        checked: results are checked in every step.
        hooked: a gradient hook of a file is called, for which the norm is summed in another order.
        skip: samples that it is not to train on, positions [first, end) in the stream.
    """

    layout: Layout
    audited: bool
    checked: bool = False
    hooked: bool = False
    skip: tuple[tuple[int, int], ...] = ()


def training_of(layout: Layout, kinds: Sequence[str]) -> Training:
    """That of a run with faults of some kinds; with three replicas, which can name one of them, it is audited.

    Not where it may have fewer of them for a while: which samples an audited step has depends on their number.
    """
    chosen = [KINDS[kind] for kind in kinds]
    events, checked = [one.event for one in chosen], any(one.checked for one in chosen)
    audited = INJECTED in events or (layout[2] > 2 and not any(one.changes_size for one in chosen))
    return Training(layout, audited and not checked, checked, SKIPPED in events)


def write_config(target: Target, data: Path, training: Training, kinds: Sequence[str]) -> None:
    """Write the configuration of a run with faults of some kinds."""
    sections: dict[str, Any] = {
        "protect": "off",
        "data": {"skip": training.skip},
        "training": {},
        "checkpoint": {
            "interval": 10,
            "keep_last": 4,
            "writing": "async",
            "memory": {"interval": 2, "partners": True, "linger_s": 120.0},
        },
        "health": {"enabled": True, "hang_floor_s": 5.0, "slow_floor_s": 15.0},
        "delay": [{"kind": "normal", "mean_s": STEP_S / 2, "std_s": 0.0}],
        "supervise": {
            "num_hosts": target.num_hosts,
            "pause_s": 1.0,
            "test_rounds": 1,
            "retest_s": 5.0,
            "spare_test_s": 0.0,
        },
    }
    if training.audited:
        sections["determinism"] = {"enabled": True}
        sections["audit"] = {"enabled": True, "interval": 10, "verify_checkpoints": True}
    if training.checked:
        sections["determinism"] = {"enabled": True}
        checks = {"enabled": True, "coverage": "all", "slice_elements": 1_000_000, "rows": True}
        sections["sdc"] = {"always_on": checks}
        sections["checkpoint"]["memory"]["interval"] = 1
        sections["checkpoint"]["require_verified"] = "never"
    if training.hooked:
        sections["optimizer_hooks"] = [{"hook": "file", "path": str(POISON), "name": "Poison", "parameters": ["*"]}]
    for prepare in (KINDS[kind].prepare for kind in kinds):
        if prepare is not None:
            prepare(target, sections)
    recompute = {"pipeline": {"activation_checkpoint_interval": 1}} if training.checked else {}
    write_drill(target.config, data, training.layout, STEPS, sections, recompute)
