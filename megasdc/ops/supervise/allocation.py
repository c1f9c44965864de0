"""Where attempts run: hosts of a hostfile, which are reached over SSH, or this one; what a job does otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megasdc.ops.launch.hosts import LOCAL_HOST
from megasdc.ops.launch.on_host import release, running
from megasdc.ops.launch.remote import Transport
from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise.history import Attempt

PROBE_S = 30.0


class Allocation:
    """Hosts of a hostfile: they are there as long as the run is.

    Args:
        name: in messages.
        slots: ranks of each host, in order.
        ssh_port: of the hosts' sshd; None: SSH's configuration says it.

    Attributes:
        name: as given.
        job: that the hosts belong to, and which start of it, in one word; empty: none.
        slots: as given.
        can_be_left: whether the run can go on in another allocation, which is without some hosts.
        is_ending: whether it ends soon, so that the run has to go on in another one.
    """

    job = ""
    can_be_left = False
    is_ending = False

    def __init__(self, name: str, slots: dict[str, int], ssh_port: int | None = None) -> None:
        self.name, self.slots, self._ssh_port = name, slots, ssh_port

    def request(self, request: LaunchRequest, attempt: Attempt) -> LaunchRequest:
        """The launch of an attempt, whose hostfile is in the request."""
        return request

    def unreachable(self, attempt: Attempt) -> tuple[str, ...]:
        """Those of an attempt's hosts that cannot be reached after its end."""
        request = {"launch_id": attempt.launch_id}
        program = Path(running.__file__)
        answers = Transport(True, self._ssh_port).run(attempt.hosts, program, request, timeout_s=PROBE_S)
        return tuple(one.host for one in answers if one.problem)

    def release(self, hosts: Sequence[str], run: str) -> None:
        """Let the memory of hosts go that holds a run's snapshots, by its id; of one that does not answer it stays."""
        transport = Transport(True, self._ssh_port, prefixes={host: self.prefix(host) for host in hosts})
        transport.run(hosts, Path(release.__file__), {"run": run}, timeout_s=PROBE_S)

    def was_cancelled(self, log: str) -> bool:
        """Whether a scheduler has cancelled an attempt, by what that has printed."""
        return False

    def lacked_memory(self, log: str, rank: int | None) -> bool:
        """Whether a scheduler says, in what an attempt has printed, that a rank was killed for want of memory.

        Args:
            rank: None: any of them.
        """
        return False

    def prefix(self, host: str) -> list[str]:
        """Words before a command that make it run on a host; empty: it reaches the host itself, by a hostfile."""
        return []

    def requeue(self, away: Sequence[str]) -> str:
        """Ask for another allocation, without some hosts; this one then ends, and this process with it.

        Returns:
            Why that cannot be; empty: it was done.
        """
        raise NotImplementedError("only where it can be left")


class ThisHost(Allocation):
    """This host alone, which is reached without SSH, and for which no other can be used.

    Args:
        num_ranks: of the run.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__("this host", {LOCAL_HOST: num_ranks})

    def request(self, request: LaunchRequest, attempt: Attempt) -> LaunchRequest:
        """See ``Allocation``: a launch without a hostfile; of all slots where the command chooses none."""
        chooses = bool(request.include or request.exclude or request.num_gpus)
        return replace(request, hostfile=None, num_gpus=request.num_gpus if chooses else attempt.slots[LOCAL_HOST])

    def unreachable(self, attempt: Attempt) -> tuple[str, ...]:
        """See ``Allocation``: none, as long as somebody asks."""
        return ()

    def prefix(self, host: str) -> list[str]:
        """See ``Allocation``."""
        return ["env"]
