"""The front's side of health during a launch: agents of all hosts connect to it
(``megasdc.ops.health.front.server``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from megasdc.common.own_address import own_address_towards
from megasdc.ops.health.front.address import front_path
from megasdc.ops.health.front.server import FrontServer, Standstill
from megasdc.ops.launch.on_host import files
from megasdc.ops.launch.plan import LaunchPlan
from megasdc.ops.launch.remote import MAX_PARALLEL
from megasdc.ops.launch.supervision import say

LOCAL_ADDRESS = "127.0.0.1"
"""Where all ranks are on this host."""
WRITE_TIMEOUT_S = 30.0


@contextmanager
def listening_for_agents(plan: LaunchPlan) -> Iterator[Standstill | None]:
    """Listen for the agents of this launch while it runs, if the run's health is watched.

    Where and with which secret is left in the run folder of rank 0's host, in a file that its user alone may read.
    Where nothing can listen, or the file cannot be left, that is told, and agents judge by the run folder. Yields what
    is known of the hosts; None: nothing listens.
    """
    server = _open(plan) if plan.program.watched else None
    try:
        yield None if server is None else server.standstill
    finally:
        if server is not None:
            server.close()
            if not server.standstill.has_met_agents:  # else ranks have removed it
                _leave_for_hosts(plan, None)


def _open(plan: LaunchPlan) -> FrontServer | None:
    health = plan.run_dir / "health"
    try:
        address = LOCAL_ADDRESS if plan.master_addr is None else own_address_towards(plan.master_addr)
        server = FrontServer(plan.launch_id, address, health, say, plan.program.alert_command)
    except OSError as error:
        say(f"health: hosts cannot be heard: {error}; their agents judge by the run folder")
        return None
    if problems := _leave_for_hosts(plan, json.dumps(asdict(server.front))):
        say(f"health: hosts cannot be told where to connect: {problems[0]}; their agents judge by the run folder")
        server.close()
        return None
    return server


def _leave_for_hosts(plan: LaunchPlan, text: str | None) -> list[str]:
    """Write the file of this front where agents look for it, or remove it; returns what went wrong.

    That is on rank 0's host; of programs whose ranks tell each other nothing, on each host, with a name of its own.
    """
    names = {plan.placement.hosts[0]: plan.launch_id}
    if plan.program.is_users:
        names = {host: f"{plan.launch_id}.{node}" for node, host in enumerate(plan.placement.hosts)}

    def leave(host: str) -> str:
        request = {"path": str(front_path(plan.run_dir / "health", names[host])), "text": text}
        (answer,) = plan.transport.run([host], Path(files.__file__), request, timeout_s=WRITE_TIMEOUT_S)
        return answer.problem or ""

    with ThreadPoolExecutor(min(MAX_PARALLEL, len(names))) as pool:
        return [problem for problem in pool.map(leave, names) if problem]
