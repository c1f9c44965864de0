"""Options of the benchmark of what saves cost training."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import ConfigError
from tools.bench.options import Options, option
from tools.bench.small.gpt import HEAD_WIDTH, SmallGpt, small_config

MOST_STEPS = 5000
"""Of a run, whose rounds end it long before."""
VOCAB = 512
TEXT = "a*.py"
"""Modules of the standard library that are the data."""


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Read sizes such as ``256x4,1024x8``.

    Raises:
        ConfigError: one is not a width that heads divide and a number of layers.
    """
    found = []
    for part in text.split(","):
        sizes = part.strip().split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes) or int(sizes[0]) % HEAD_WIDTH:
            raise ConfigError(
                f"--sizes: {part!r} is not hidden x layers, such as 512x8, hidden a multiple of {HEAD_WIDTH}"
            )
        found.append((int(sizes[0]), int(sizes[1])))
    return tuple(found)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read numbers of ranks such as ``1,2``.

    Raises:
        ConfigError: one is not a number from 1.
    """
    if not all(part.strip().isdecimal() and int(part) for part in text.split(",")):
        raise ConfigError(f"--ranks: {text!r} must be numbers of ranks separated by commas, such as 1,2")
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class StallOptions(Options):
    """Sizes of the models, and how often everything is done with each; 120 B of memory and 70 B of disk a parameter."""

    sizes: tuple[tuple[int, int], ...] = option(
        ((256, 4), (512, 8), (1024, 8)),
        "Models, hidden x layers, separated by commas.",
        given="256x4,512x8,1024x8",
        callback=parse_sizes,
    )
    ranks: tuple[int, ...] = option((1, 2), "Numbers of replicas, with commas.", given="1,2", callback=parse_ranks)
    sequence: int = option(512, "Tokens of a sample.", least=8)
    micro_batches: int = option(8, "Of a replica's step.", least=1)
    micro_batch: int = option(1, "Samples of a micro-batch.", least=1)
    rounds: int = option(3, "Rounds of quiet steps, both saves, and snapshots in memory.", least=1)
    quiet: int = option(2, "Quiet steps before each save.", least=1)
    snapshots: int = option(3, "Snapshots in memory in a row, in each round.", least=2)
    folder: Path | None = option(None, "Where checkpoints are written, on the disk; default: the temporary folder.")

    def problems(self) -> list[str]:
        """See ``Options``."""
        if self.folder is not None and not (self.folder.is_dir() and os.access(self.folder, os.W_OK)):
            return [f"--folder: {self.folder} is not a folder that can be written"]
        return []

    def gpt(self, size: tuple[int, int]) -> SmallGpt:
        """The model of a size."""
        hidden, layers = size
        return SmallGpt(hidden, layers, self.sequence, VOCAB, self.micro_batch, self.micro_batches)

    def config(self, size: tuple[int, int], data: Path, folder: Path) -> dict[str, Any]:
        """The configuration of a run that writes to ``folder``: all that saves can do is there, and the rank picks."""
        checkpoint = {"interval": 1, "keep_last": 1, "writing": "async", "memory": {"interval": 1}}
        sections = {"checkpoint": checkpoint, "health": {"enabled": False}}
        return small_config(self.gpt(size), folder, MOST_STEPS, sections, data=data)
