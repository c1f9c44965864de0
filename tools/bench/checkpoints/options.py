"""Options of the benchmarks of checkpoints."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.cli.app import output_folder
from megasdc.common.errors import ConfigError
from tools.bench.campaign import CampaignOptions
from tools.bench.checkpoints.recovery_kinds import KINDS
from tools.bench.options import Options, option, parsed
from tools.bench.small.gpt import HEAD_WIDTH, SmallGpt, small_config

MIB = 1 << 20
TENSOR_MIB = 16
TENSOR_RANKS = 8


@dataclass(frozen=True)
class CompareBenchOptions(Options):
    """Compare two equal files of tensors in the page cache, against cat and cmp; exit code 1 if a bar is missed.

    At least 0.8 of the rate of cat, and at most 16 MiB more memory for four times the size. Run it on a machine that
    does nothing else.

    Args:
        blocks: one pair before those that count does not.
        folder: the files in it are removed in the end.
    """

    blocks: int = option(15, "Blocks of each side.", least=1)
    size_mib: int = option(
        1024, "MiB of each of two files; four times as much has to be free.", "--size", least=4 * TENSOR_MIB
    )
    jobs: int | None = option(None, "Threads that read; default: one per core.", min=1)
    folder: Path = option(Path("/dev/shm"), "Where the files are written.", **output_folder())

    def problems(self) -> list[str]:
        """See ``Options``."""
        if not self.folder.is_dir():
            return [f"--folder: {self.folder} is no folder"]
        free = shutil.disk_usage(self.folder).free // MIB
        if free < 4 * self.size_mib:
            return [f"--folder: {self.folder} has {free} MiB free, needed are {4 * self.size_mib}"]
        return []


@dataclass(frozen=True)
class CompareManifestsOptions(Options):
    """Compare two synthetic manifests of a large checkpoint; exit code 1 if it takes more than 30 s or 1 GiB.

    The command that users call is run in a process of its own, its start with it, and must name the one block that
    differs.
    """

    size_gb: int = option(1000, "Size of the synthetic checkpoint, in 10^9 bytes.", least=1)
    ranks: int = option(4096, "Ranks that wrote a shard each; a multiple of 8.", least=1)
    runs: int = option(3, "Runs of the command.", least=1)

    def problems(self) -> list[str]:
        """See ``Options``."""
        return [f"--ranks: {self.ranks} must be a multiple of {TENSOR_RANKS}"] if self.ranks % TENSOR_RANKS else []


@dataclass(frozen=True)
class ArchivedGpt(SmallGpt):
    """A model whose tensors have blocks of their own."""

    hidden: int = option(256, "Width of the model; a multiple of 32.", least=32)
    layers: int = option(4, "Transformer layers.", least=1)
    sequence: int = 128
    vocab: int = 4000
    micro_batches: int = 4


@dataclass(frozen=True)
class ArchiveBenchOptions(Options):
    """Train small models, archive two successive checkpoints of each, and resume from quantized moments; no bar.

    Size against raw and against zstd alone, by kind of tensor; rates of pushing and pulling; the share that the second
    checkpoint has in common with the first; losses after a resume from moments of 8 bits.

    Args:
        gpt: sizes of the model.
        steps: checkpoints of these and of ``apart`` steps before are archived; the run goes on for ``apart`` steps.
    """

    gpt: SmallGpt = ArchivedGpt()
    steps: int = option(200, "Steps before the archived checkpoint.", least=2)
    apart: int = option(20, "Steps between two archived checkpoints, and after the last of them.", least=1)
    precisions: str = option("fp32,bf16", "fp32, bf16 or both, with a comma between.")
    workers: int = option(2, "Threads of pushing and pulling.", least=1)

    def problems(self) -> list[str]:
        """See ``Options``."""
        wrong = [one for one in self.precisions.split(",") if one not in ("fp32", "bf16")]
        found = [f"--precisions: {one!r} must be fp32 or bf16" for one in wrong]
        if self.apart >= self.steps:
            found.append(f"--apart: {self.apart} must be less than --steps {self.steps}")
        return found + self.gpt.problems()


@dataclass(frozen=True)
class RecoveryOptions(CampaignOptions):
    """Kill and damage runs that save beside training, and start them again; exit code 1 if one does not end right.

    All losses and the last checkpoint as without a fault, each start from the newest step that was whole, no checkpoint
    lost that a fault did not destroy, nothing left in memory. Kinds with several hosts or a full disk need root.
    """

    known = KINDS

    drills: int = option(300, "Faults, kinds and layouts in turn.", least=1)
    kinds: str = option(",".join(KINDS), "Kinds of faults.")
    layouts: str = option("1x1x2,1x2x1,1x1x3,1x2x2,2x1x2", "Tensor x pipeline x data of each layout.")


MOST_STEPS = 50_000
"""Of a run, whose rounds end it long before."""
VOCAB = 512
TEXT = "a*.py"
"""Modules of the standard library that are the data."""


SIZES = "256x4,512x8,1024x8"


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
    """Measure what saves cost training, on the disk and in memory; exit code 1 if a bar is missed.

    A save beside training stalls it for at most 5 % of one that waits, and but for the wait for its copy for 1 % of a
    step; micro-batches beside a copy or a writer take at most 1.03 of quiet ones, and steps of one rank that are all
    kept in memory 1.02. The sizes of the default take an hour on a machine that does nothing else.

    Args:
        sizes: 120 B of memory and 70 B of disk a parameter.
    """

    sizes: tuple[tuple[int, int], ...] = parsed(SIZES, "Models, hidden x layers, separated by commas.", parse_sizes)
    ranks: tuple[int, ...] = parsed("1,2", "Numbers of replicas, with commas.", parse_ranks)
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


STEPS = 1000
"""Of a run, most of which are never taken."""


@dataclass(frozen=True)
class RestoreOptions(Options):
    """Measure how fast checkpoints are restored, and the parts of restarts; exit code 1 if a bar is missed.

    At least 0.8 of the rate at which cat reads the same files from the disk. Restarts are from memory, from partners,
    and from the disk, which is also slowed down; for the last, and for partners, a user needs rights to limit disks and
    to name hosts, as root has them.
    """

    sizes: tuple[tuple[int, int], ...] = parsed(
        SIZES, "Models of the rate, hidden x layers, separated by commas; the last is restarted too.", parse_sizes
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
