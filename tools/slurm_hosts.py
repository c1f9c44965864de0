"""SLURM on test hosts: a real controller on the first, a real node daemon on each, with munge between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasdc.ops.cluster import SUBNET, Cluster

PROGRAMS = ("munged", "slurmctld", "slurmd")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_CONF = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
MinJobAge=600
ReturnToService=2
KillWait=30
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
NodeName={names} NodeAddr={addresses} CPUs=2 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def slurm_unavailable_reason() -> str | None:
    """Say why SLURM cannot be started here, or return None when it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"missing Debian package: slurm-wlm ({', '.join(missing)})" if missing else None


class SlurmCluster(Cluster):
    """Test hosts that SLURM gives jobs to, two CPUs and a GPU that is none each, for the time of a ``with`` block.

    Args:
        folder: where everything is kept; created if absent.
        num_hosts: how many hosts.
        env: environment of every process that starts on a host.
        settings: further lines of slurm.conf.
    """

    def __init__(
        self,
        folder: Path,
        num_hosts: int = 2,
        env: Mapping[str, str] | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        self._slurm_folder = folder.resolve() / "slurm"
        self._settings = settings
        super().__init__(folder, num_hosts, {"SLURM_CONF": str(self._slurm_folder / "slurm.conf"), **(env or {})})

    def run_on_first(self, *argv: str, timeout_s: float = 200.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command, such as one of SLURM's, on the first host, to its end."""
        return self.run(self.names[0], argv, timeout_s=timeout_s, **options)

    def logs(self) -> str:
        """What the daemons have said."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self._slurm_folder.glob("*.log")))

    def _start_services(self, names: Sequence[str]) -> None:
        for name in names:
            # Its key lies in a folder of everybody's, which munge would refuse.
            self._daemon(name, "munged", "--foreground", "--force", f"--key-file={self._slurm_folder}/munge.key")
        if self.names[0] in names:
            self._daemon(self.names[0], "slurmctld", "-D")
        for name in names:
            self._daemon(name, "slurmd", "-D", "-N", name)
        if self.names[0] in names:
            self._wait_until_idle()

    def _daemon(self, name: str, program: str, *arguments: str) -> None:
        log = open(self._slurm_folder / f"{program}_{name}.log", "ab")  # noqa: SIM115 - open as long as the host is on
        self._logs.append(log)
        path = shutil.which(program, path=_PATH)
        assert path is not None, program
        self.popen(name, ["mkdir", "-p", "/run/munge"]).wait()
        self.popen(name, [path, *arguments], stdout=log, stderr=log)

    def _wait_until_idle(self, timeout_s: float = 120.0) -> None:
        end = time.monotonic() + timeout_s
        while True:
            found = self.run_on_first("sinfo", "--noheader", "--Node", "--format=%T")
            if found.stdout.split() == ["idle"] * len(self.names):
                return
            assert time.monotonic() < end, f"{found.stdout}{found.stderr}\n{self.logs()}"
            time.sleep(0.2)

    def _write_files(self) -> None:
        super()._write_files()
        self._slurm_folder.mkdir(parents=True, exist_ok=True)
        (self._slurm_folder / "state").mkdir(exist_ok=True)
        key = self._slurm_folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        count = len(self.names)
        (self._slurm_folder / "slurm.conf").write_text(
            _CONF.format(
                controller=f"node1({SUBNET}.11)",
                folder=self._slurm_folder,
                names=f"node[1-{count}]",
                addresses=f"{SUBNET}.[11-{10 + count}]",
            )
            + "".join(f"{line}\n" for line in self._settings)
        )
        (self._slurm_folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (self._slurm_folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
