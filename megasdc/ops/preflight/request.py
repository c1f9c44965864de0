"""The user's request for a preflight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_STEPS = 20


@dataclass(frozen=True)
class PreflightRequest:
    """The user's request; the names are those of ``megasdc preflight``.

    Args:
        config_path: the run's JSON file.
        launcher_args: further options for DeepSpeed's launcher.
        hostfile: of the run, spares too; None: this host only.
        num_ranks: of this host, without a hostfile.
        script: training script; None: that of ``megasdc launch``.
        overrides: texts ``a.b.c=value``.
        steps: of the short runs, at least 2.
        skip: names of checks that are not done.
        golden: folder of golden values; None: ``supervise.golden``.
        stress_all: whether all hosts are tested, not the spares alone.
        keep: whether what the short runs wrote stays.
    """

    config_path: Path
    launcher_args: tuple[str, ...] = ()
    hostfile: Path | None = None
    num_ranks: int | None = None
    script: Path | None = None
    overrides: tuple[str, ...] = ()
    steps: int = DEFAULT_STEPS
    skip: tuple[str, ...] = ()
    golden: Path | None = None
    stress_all: bool = False
    keep: bool = False
