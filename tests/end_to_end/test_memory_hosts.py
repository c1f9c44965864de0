"""Snapshots in memory on several hosts: what a lost host held is at its partner, and the run goes on from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_health_hosts import wait_until
from test_launch_train import folder, steps_done  # noqa: F401 - a fixture

from megasdc.events import read_events
from tools.hosts import Cluster, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),
]
STEPS = 60
TOOLS = Path(__file__).parents[2] / "tools"


def _write(path: Path, raw: dict[str, Any], run: str, **memory: Any) -> None:
    raw = json.loads(json.dumps(raw))
    raw["megasdc"]["training"] |= {"steps": STEPS, "eval_interval": 0}
    raw["megasdc"]["logging"] |= {"interval": 1, "run_dir": run}
    raw["megasdc"]["checkpoint"] = {"interval": 0, "memory": memory}
    raw["megasdc"]["health"] = {"enabled": True}
    path.write_text(json.dumps(raw))


def test_a_lost_host_is_replaced_from_its_partners_memory(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    """Two hosts train, one is powered off, a third takes its place with nothing on any disk: equal bits at the end."""
    raw = json.loads((folder / "config.json").read_text())
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    config, plain = folder / "config.json", folder / "plain.json"
    _write(config, raw, str(folder / "run"), interval=2, partners=True, linger_s=120)
    _write(plain, raw, str(folder / "plain"), interval=0)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with Cluster(tmp_path / "cluster", 3, env=env) as hosts:

        def argv(given: Path, *names: str) -> list[str]:
            listed = str(hosts.hostfile(names))
            return [sys.executable, "-m", "megasdc", "launch", "--hostfile", listed, "--config", str(given)]

        launch = hosts.popen("node1", argv(config, "node1", "node2"), cwd=str(folder), **pipes)
        wait_until(lambda: len(steps_done(folder)) > 20, launch)
        hosts.power_off("node2")
        said, _ = launch.communicate(timeout=120)
        assert launch.returncode == 78, said
        last = max(steps_done(folder))
        again = hosts.run("node1", argv(config, "node1", "node3"), cwd=str(folder), timeout_s=200)
        assert again.returncode == 0, again.stdout + again.stderr
        fresh = hosts.run("node1", argv(plain, "node1", "node3"), cwd=str(folder), timeout_s=200)
        assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    (event,) = read_events(folder / "run", kind="resume", name="memory")
    assert event.fields["origin"] == "memory, ranks 1 from their partners"
    assert event.fields["disk_step"] is None
    assert event.step is not None and last - 8 <= event.step <= last
    ends = [folder / name / "checkpoints" / f"step_{STEPS:08d}" for name in ("run", "plain")]
    compare = [sys.executable, str(TOOLS / "compare_checkpoints.py"), *map(str, ends)]
    compared = subprocess.run(compare, capture_output=True, text=True, check=False)
    assert compared.returncode == 0, compared.stdout + compared.stderr
