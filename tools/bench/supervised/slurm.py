"""A supervised run as faults find it that is a SLURM job: it has spare nodes, and there is one more beside it."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megasdc.ops.supervise.diagnosis import SIGNALS
from megasdc.ops.supervise.slurm import fields_of
from tools.bench.supervised.target import ENVIRONMENT, Target
from tools.slurm_hosts import SlurmCluster

SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "supervise.sbatch"
SETTINGS = ("SlurmdTimeout=10", "AuthInfo=cred_expire=5")
"""A lost node is known soon, and a job that was requeued starts again soon."""
BESIDE = 1
"""Nodes beside those of the job, so that it can be requeued without one."""
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")


class SlurmTarget(Target):
    """A run in a job, on any nodes but the first, which has the controller; with no spare where nodes are lacking."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, num_hosts: int, spares: int, slots: int, chance: random.Random
    ) -> None:
        super().__init__(slurm, folder, num_hosts, slots, chance)
        self._slurm, self._spares = slurm, spares

    def start(self) -> None:
        """See ``Target``."""
        words = [f"--nodes={self.num_hosts}-{self.num_hosts + self._spares}", f"--exclude={self.hosts.names[0]}"]
        words += [f"--ntasks-per-node={self.slots}", "--cpus-per-task=1", "--gpus-per-node=1"]
        log = f"--output={self.folder}/supervisor.log"
        self.job = self.scheduler("sbatch", "--parsable", *words, log, str(SCRIPT), str(self.config)).strip()

    def exit_code(self) -> int | None:
        """See ``Target``."""
        shown = fields_of(self.scheduler("scontrol", "--oneliner", "show", "job", self.job))
        if (state := shown.get("JobState")) not in _ENDED:
            return None
        code, number = map(int, shown["ExitCode"].split(":"))
        return 0 if state == "COMPLETED" else code or SIGNALS + number

    def power_on(self, host: str) -> None:
        """See ``Target``."""
        self._slurm.reboot(host)

    def scheduler(self, *words: str) -> str:
        """See ``Target``."""
        return self._slurm.run_on_first(*words, cwd=str(self.folder)).stdout


@contextmanager
def in_slurm(folder: Path, num_hosts: int, spares: int, slots: int, chance: random.Random) -> Iterator[Target]:
    """Nodes for a job, with spares, and one beside it, for the time of a ``with`` block; SSH between them is refused.

    Args:
        folder: and others, as of ``Target``.
    """
    refused = folder / "refused"
    refused.mkdir()
    (refused / "ssh").write_text("#!/bin/sh\nexit 255\n", encoding="utf-8")
    (refused / "ssh").chmod(0o755)
    env = {**ENVIRONMENT, "PATH": f"{refused}:{ENVIRONMENT['PATH']}", "PYTHON": sys.executable}
    count = 1 + num_hosts + spares + BESIDE
    # In a short folder: sockets of slurmd lie in it, whose names may have 108 characters.
    with tempfile.TemporaryDirectory() as short, SlurmCluster(Path(short), count, env, SETTINGS) as slurm:
        yield SlurmTarget(slurm, folder, num_hosts, spares, slots, chance)
