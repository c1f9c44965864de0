"""Options of the benchmarks of checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from megasdc.cli.app import output_folder
from tools.bench.options import Options, option
from tools.bench.small.gpt import SmallGpt

MIB = 1 << 20
TENSOR_MIB = 16
TENSOR_RANKS = 8


@dataclass(frozen=True)
class CompareBenchOptions(Options):
    """Sizes of a comparison of checkpoints; one pair of blocks before those that count does not.

    The files in ``folder`` are removed in the end.
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
    """Size of a comparison of manifests."""

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
    """Runs whose checkpoints are archived; ``gpt``: sizes of their model.

    Checkpoints of ``steps`` and of ``apart`` steps before are archived; the run goes on for ``apart`` steps.
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
