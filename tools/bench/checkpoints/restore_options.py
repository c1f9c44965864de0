"""Options of the benchmark of restarts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.checkpoints.stall_options import VOCAB, parse_sizes
from tools.bench.options import Options, option
from tools.bench.small.gpt import SmallGpt, small_config

STEPS = 1000
"""Of a run, most of which are never taken."""


@dataclass(frozen=True)
class RestoreOptions(Options):
    """Sizes of the models, and how often each is restored."""

    sizes: tuple[tuple[int, int], ...] = option(
        ((256, 4), (512, 8), (1024, 8)),
        "Models of the rate, hidden x layers, separated by commas; the last is restarted too.",
        given="256x4,512x8,1024x8",
        callback=parse_sizes,
    )
    blocks: int = option(7, "Restores of each model, and readings of its files.", least=1)
    ranks: int = option(2, "Replicas that are restarted, each on a host of its own.", least=1)
    restarts: int = option(3, "Restarts from each place; 0: none.", least=0)
    disk_mb_s: float = option(100.0, "MB/s of the disk that is slowed down.", "--disk-mb-s", min=1.0)
    folder: Path | None = option(None, "Where checkpoints are written, on the disk; default: the temporary folder.")

    def problems(self) -> list[str]:
        """See ``Options``."""
        if self.folder is not None and not (self.folder.is_dir() and os.access(self.folder, os.W_OK)):
            return [f"--folder: {self.folder} is not a folder that can be written"]
        return []

    def config(self, size: tuple[int, int], folder: Path, checkpoint: dict[str, Any], data: Path) -> dict[str, Any]:
        """The configuration of a run that writes to ``folder``, of one short micro-batch a step."""
        gpt = SmallGpt(*size, sequence=32, vocab=VOCAB, micro_batches=1)
        sections = {"checkpoint": checkpoint, "health": {"enabled": False}}
        return small_config(gpt, folder, STEPS, sections, data=data)
