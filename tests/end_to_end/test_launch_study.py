"""A study over two hosts by the launcher: each replica on a host of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from test_launch_train import folder, tiny_config  # noqa: F401 - a fixture

import megasdc
from megasdc.lab.studies.tables import summarize_study
from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.run_folder.study_log import read_study

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),
]


def test_the_wrong_host_is_found(tmp_path: Path, folder: Path) -> None:  # noqa: F811 - the fixture
    """Wrong results of one host are told with its name; a replica that ends takes the launch with it, and is named."""
    raw = tiny_config()
    raw["megasdc"] |= {
        "protect": "off",
        "training": {"steps": 3},
        "determinism": {"enabled": True},
        "study": {"mode": "computation_sync", "replicas": 2},
        "faults": [{"host": "node2", "submodule": "*.linear_fc2", "kind": "scale", "factor": 1.5, "elements": 3}],
    }
    (folder / "config.json").write_text(json.dumps(raw))
    package = str(Path(megasdc.__file__).parents[1])
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONPATH": package}
    with Cluster(tmp_path / "cluster", 2, env=env) as hosts:
        argv = [sys.executable, "-m", "megasdc", "launch", "--hostfile", str(hosts.hostfile())]
        argv += ["--config", str(folder / "config.json")]
        done = hosts.run("node1", argv, cwd=str(folder), timeout_s=150)
        assert done.returncode == 0, done.stderr
        assert "all 2 ranks are done" in done.stderr
        fault = '[{"kind": "exit", "exit_code": 9, "replica": 1, "steps": [4, 4]}]'
        more = ["--set", "megasdc.training.steps=6", "--set", f"megasdc.process_faults={fault}"]
        ended = hosts.run("node1", [*argv, *more], cwd=str(folder), timeout_s=150)
    hosts_of = {line["replica"]: line["host"] for line in read_study(folder / "run", "start")}
    assert hosts_of == {0: "node1", 1: "node2"}
    (row,) = [row for row in summarize_study(folder / "run").mismatches if row.mismatches]
    assert (row.replica, row.name, row.phase, row.mismatches) == (1, "ffn", "forward", 3 * 3 * 2 * 2)
    assert ended.returncode != 0 and "rank 1 on node2" in ended.stderr, ended.stderr
