"""Snapshots in memory on several hosts: what a lost host held is at its partner, and the run goes on from there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_health_hosts import wait_until
from test_launch_train import folder, steps_done  # noqa: F401 - a fixture
from test_supervise import ended_as_without_faults, write

from megasdc.events import read_events
from megasdc.ops.cluster import Cluster, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),
]


def test_a_lost_host_is_replaced_from_its_partners_memory(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    programs: Path,
) -> None:
    """Two hosts train, one is powered off, a third takes its place with nothing on any disk: equal bits at the end."""
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    # Each snapshot is at the partner before the next one is due, on a busy machine too.
    config = write(folder, "run", delay=[{"kind": "normal", "mean_s": 0.5, "std_s": 0.0, "steps": [12, 24]}])
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with Cluster(tmp_path / "cluster", 3, env=env) as hosts:

        def argv(*names: str) -> list[str]:
            listed = str(hosts.hostfile(names))
            return [str(programs / "python"), "-m", "megasdc", "launch", "--hostfile", listed, "--config", str(config)]

        launch = hosts.popen("node1", argv("node1", "node2"), cwd=str(folder), **pipes)
        wait_until(lambda: len(steps_done(folder)) > 20, launch)
        hosts.power_off("node2")
        said, _ = launch.communicate(timeout=120)
        assert launch.returncode == 78, said
        last = max(steps_done(folder))
        again = hosts.run("node1", argv("node1", "node3"), cwd=str(folder), timeout_s=200)
        assert again.returncode == 0, again.stdout + again.stderr
    (event,) = read_events(folder / "run", kind="resume", name="memory")
    assert event.fields["origin"] == "memory, ranks 1 from their partners"
    assert event.fields["disk_step"] is None
    assert event.step is not None and last - 8 <= event.step <= last
    ended_as_without_faults(folder)
