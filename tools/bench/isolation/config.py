"""Configuration of runs that can go on without a replica: a tiny model, and checks of all that a step computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.campaign import Layout
from tools.bench.small.drill import write_drill

BATCH = 12


def write_config(
    folder: Path,
    data: Path,
    layout: Layout,
    steps: int,
    more: Mapping[str, Any],
    deepspeed: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``config.json`` into the folder of a run, which is made.

    Args:
        data: prepared.
        more: sections of megasdc; one that is here, too, is replaced.
        deepspeed: more of DeepSpeed's.
    """
    checks = {"enabled": True, "coverage": "all", "slice_elements": 1_000_000, "rows": True}
    policy = dict.fromkeys(("persistent", "intermittent", "not_reproduced"), "isolate")
    sections = {
        "model": {"num_layers": 2},
        "determinism": {"enabled": True},
        "sdc": {"always_on": checks, "repeats": 2, "policy": policy},
        "checkpoint": {
            "interval": steps,
            "writing": "async",
            "memory": {"interval": 1, "partners": True},
            "other_layout": "convert",
            "require_verified": "never",
        },
        "logging": {"run_dir": str(folder)},
        **more,
    }
    common = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "pipeline": {"activation_checkpoint_interval": 1},
        **(deepspeed or {}),
    }
    folder.mkdir()
    return write_drill(folder / "config.json", data, layout, steps, sections, common)
