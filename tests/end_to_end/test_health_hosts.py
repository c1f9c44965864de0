"""A run that is stuck on several hosts whose run folders are not shared: the front of the launch names the rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from cluster import Cluster, unavailable_reason
from test_launch_train import folder  # noqa: F401 - a fixture

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),
]


def test_the_front_names_a_stuck_rank_of_another_host(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    """Neither host sees the other's files; all ranks end with 75, and the front writes one incident."""
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["parallel"] |= {"pipeline": 2, "timeout_s": 300.0}
    raw["megasdc"]["health"] = {"enabled": True, "hang_floor_s": 3.0, "slow_floor_s": 8.0}
    raw["megasdc"]["process_faults"] = [{"kind": "hang", "rank": 1, "phase": "forward", "steps": [20, 20]}]
    (folder / "config.json").write_text(json.dumps(raw))
    run = folder / "run"
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 2, env=env, private=[run]) as hosts:
        argv = [sys.executable, "-m", "megasdc", "launch", "--hostfile", str(hosts.hostfile())]
        done = hosts.run("node1", [*argv, "--config", str(folder / "config.json")], cwd=str(folder), timeout_s=200)
        front = hosts.private_dir("node1", run) / "health"
        other = hosts.private_dir("node2", run) / "health"
    assert done.returncode == 75, done.stderr
    assert "health: nothing moved for" in done.stderr and "rank 1 on node2" in done.stderr
    (path,) = (front / "incidents").glob("hang_*.json")
    incident = json.loads(path.read_text())
    assert (incident["kind"], incident["ranks"], incident["hosts"]) == ("hang/behind", [1], ["node2"])
    assert [state["host"] for state in incident["states"]] == ["node1", "node2"], "both hosts were heard"
    assert "waits for rank 1 in receive gradient" in incident["waits"]["0"]
    assert not (other / "incidents").exists() and not list(front.glob("front_*.json"))
    last = json.loads((other / "node_00001.jsonl").read_text().splitlines()[-1])
    assert "problems" not in last and not (other / "node_00001.now").exists()
