"""The agent of a host reads its devices: changes are notes of its lines, and an incident has what came before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nvml_states import HEALTHY, ROOT, build

from megasdc.ops.health.agent import AgentOptions
from megasdc.ops.health.record import RecordReader, record_path

pytestmark = pytest.mark.slow
RANK = """
import os, socket, sys, time
from pathlib import Path
from megasdc.ops.health.phases import Phase
from megasdc.common.host import started_at
from megasdc.ops.health.rank_watch import RankWatch
from megasdc.ops.health.record import WatchedIdentity, HeartbeatWriter
here = WatchedIdentity("run.1.ab12", 0, 0, 1, 0, 0, 0, socket.gethostname(), 0, os.getpid(), started_at(os.getpid()))
record = HeartbeatWriter(Path(sys.argv[1]), here)
record.enter(Phase.FORWARD, 5, 0)
watch = RankWatch(record, lambda code, message: os._exit(code))
time.sleep(60)
"""
"""A rank that does not go on, and answers."""


def test_an_incident_has_what_the_counters_did_before(tmp_path: Path) -> None:
    """An XID before a hang is in the incident with its verdict, and the change is a note."""
    records, run = tmp_path / "records", tmp_path / "run"
    records.mkdir()
    run.mkdir()
    state = tmp_path / "state"
    state.write_text("".join(f"{key} {value}\n" for key, value in HEALTHY.items()))
    environment = {**os.environ, "NVML_STATE": str(state), "PYTHONPATH": str(ROOT)}
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(records)], env=environment)
    try:
        wait_until(record_path(records, 0).exists)
        host = RecordReader(record_path(records, 0)).identity.host
        options = AgentOptions(records, run, 0, (0,), (host,), 3, 3, 10, ())
        environment["LD_LIBRARY_PATH"] = str(build(tmp_path / "nvml"))
        agent = [sys.executable, "-m", "megasdc.ops.health.agent", options.encode()]
        subprocess.run(agent, env=environment, check=True, timeout=60)
        lines = run / "health" / "node_00000.jsonl"
        wait_until(lines.exists)
        with open(state, "a", encoding="utf-8") as file:
            file.write("event.0 0:79\n")
        assert rank.wait(timeout=60) == 75
        wait_until(lambda: '"note": "ends' in lines.read_text())
        assert not records.exists()
    finally:
        rank.kill()
    (path,) = (run / "health" / "incidents").iterdir()
    (survey,) = json.loads(path.read_text())["devices"]
    (device,) = survey["readings"][0]["items"]
    assert (survey["verdict"], device["id"], device["verdict"]) == ("unfit", "GPU-a", "unfit")
    assert device["xid_counts"] == {"79": 1} and "fallen off" in device["reasons"][0]["text"]
    assert device["values"]["temperature_c"] == 41 and device["recent_s"] == 600
    assert survey["readings"][1]["items"][0]["values"]["load_1min"] is not None
    said = [json.loads(line) for line in lines.read_text().splitlines()]
    assert sum("GPU 0 Test GPU (GPU-a): fit -> unfit, XID 79" in one["note"] for one in said) == 1
    last = said[-1]
    (gpu,) = (one for one in last["devices"] if "GPU-a" in one["name"])
    assert gpu["xid_counts"] == {"79": 1} and gpu["verdict"] == "unfit"


def wait_until(done: Callable[[], bool]) -> None:
    """Until it is true, at most 60 s."""
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until, done
        time.sleep(0.02)
