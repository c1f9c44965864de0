"""A run whose checkpoints tests archive."""

from __future__ import annotations

from pathlib import Path

from megasdc.durable import write_durably

RUN = "20261125-100000-abcdef"


def write_identity(folder: Path) -> None:
    """Make a folder that of the run, as its first start does."""
    write_durably(folder / "run.json", f'{{"format": "megasdc.run.v1", "run": "{RUN}", "attempt": 1}}\n')
