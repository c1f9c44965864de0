"""`megasdc preflight` on this host and on test hosts: what it finds is so, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import forked_programs
from test_launch_train import STEPS, folder  # noqa: F401 - a fixture

from megasdc.ops.cluster import Cluster, unavailable_reason

REASON = unavailable_reason()
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]
BATCH = 2 * 2
"""Samples of a step of each replica, in the fixture's configuration."""


def left(folder: Path) -> set[Path]:  # noqa: F811
    """All files and folders but the index of samples, which is kept beside the data for the run itself."""
    return {path for path in folder.rglob("*") if ".index_cache" not in path.parts}


def rewrite(folder: Path, **sections: Any) -> Path:  # noqa: F811
    """Change sections of the fixture's configuration."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for name, section in sections.items():
        raw["megasdc"][name] = section
    path.write_text(json.dumps(raw))
    return path


def command(folder: Path, *options: str) -> list[str]:  # noqa: F811
    """The command line of a preflight."""
    config = str(folder / "config.json")
    return [sys.executable, "-m", "megasdc", "preflight", "--json", "--config", config, *options]


def preflight(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:  # noqa: F811
    """A preflight of the run on this host, its processes forks of one server: exit code, and checks by name."""
    with tempfile.TemporaryDirectory() as place, forked_programs(Path(place)) as programs:
        _, *argv = command(folder, "--num-ranks", "2", *options)
        argv.insert(0, str(programs / "python"))
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["exit_code"] == done.returncode
    return done.returncode, {one["name"]: one for one in result["checks"]}


def test_a_run_on_this_host_is_ready(folder: Path) -> None:  # noqa: F811
    """All checks that can be made are; the resumed run has the same bits; the predicted checkpoint is the real one."""
    rewrite(
        folder,
        determinism={"enabled": True},
        checkpoint={"interval": 100, "memory": {"interval": 10}, "archive": {"address": str(folder / "archive")}},
    )
    before = left(folder)
    code, checks = preflight(folder, "--steps", "6")
    assert code == 0, checks
    status = {name: one["status"] for name, one in checks.items()}
    assert status["golden"] == status["spares"] == "not done"
    assert {status[name] for name in ("hosts", "storage", "steps", "resume")} == {"ok"}, checks
    assert checks["steps"]["figures"]["steps"] == 6 and checks["steps"]["figures"]["step_s"] > 0
    assert checks["resume"]["figures"] == {"same": True} and "step 3" in checks["resume"]["text"]
    manifest = json.loads((folder / "data" / "manifest.json").read_text())
    passes = STEPS * BATCH * 2 / ((manifest["splits"]["train"]["num_tokens"] - 1) // 32)
    assert checks["data"]["figures"]["passes"] == pytest.approx(passes) and checks["data"]["figures"]["every_byte"]
    assert "repeated" in checks["data"]["text"] and checks["data"]["status"] == "warning"
    cost = checks["cost"]["figures"]
    assert cost["checkpoint_bytes"] == pytest.approx(
        checks["storage"]["figures"]["predicted_checkpoint_bytes"], rel=0.2
    )
    assert cost["memory_stall_s"] > 0 and cost["best_interval"] > 0
    assert left(folder) == before


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_ends_all_and_leaves_nothing(folder: Path, number: signal.Signals) -> None:  # noqa: F811
    """In the middle of a short run: its ranks end, the folder goes, and the code is 128 + n."""
    before = left(folder)
    process = subprocess.Popen(
        command(folder, "--num-ranks", "2", "--steps", str(STEPS)),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - ignored in background jobs
    )
    end = time.monotonic() + 120
    while not any("train/loss" in path.read_text() for path in folder.glob("run/preflight/*/whole/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.1)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + number, err
    assert len(below) >= 3 and not psutil.wait_procs(below, timeout=20)[1]
    assert left(folder) == before


NOISE = """
import time
from megasdc.optim.hooks import GradientHook


class Noise(GradientHook):
    def apply(self, part):
        part.gradient.add_(1e-3 * (time.monotonic() % 1))
"""
"""A hook by which no two runs are equal."""


@pytest.mark.full
def test_a_resume_that_differs(folder: Path) -> None:  # noqa: F811
    """Where runs must repeat it is a failure with 1; else a warning that says why it can be. Skipped checks are not."""
    (folder / "noise.py").write_text(NOISE)
    hook = {"hook": "file", "path": str(folder / "noise.py"), "name": "Noise", "parameters": ["*"]}
    rewrite(folder, optimizer_hooks=[hook])
    options = ("--steps", "4", "--skip", "data,hosts,storage,cost")
    for enabled, status, expected in (("true", "failed", 1), ("false", "warning", 0)):
        code, checks = preflight(folder, *options, "--set", f"megasdc.determinism.enabled={enabled}")
        assert (checks["resume"]["status"], code) == (status, expected), checks["resume"]
        assert checks["resume"]["figures"] == {"same": False}
        assert ("determinism.enabled is false" in checks["resume"]["text"]) is (enabled == "false")
        assert checks["data"]["text"] == "left out by --skip" and checks["steps"]["status"] == "ok"


@pytest.fixture
def small_storage(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_spare_is_off_and_storage_is_small(tmp_path: Path, small_storage: Path, folder: Path) -> None:  # noqa: F811
    """77 for the storage, a warning for the spare, which is named; all other checks are made on the two hosts."""
    golden = tmp_path / "golden"
    record = [sys.executable, "-m", "megasdc", "stress", "--record", "--golden", str(golden), "--only", "gemm"]
    subprocess.run([*record, "--rounds", "1"], check=True, capture_output=True)
    rewrite(
        folder,
        checkpoint={"interval": 5, "keep_last": 50, "folder": str(small_storage)},
        supervise={"num_hosts": 2, "test_rounds": 1},
    )
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 3, env=env) as hosts:
        hosts.power_off("node3")
        argv = command(folder, "--hostfile", str(hosts.hostfile()), "--steps", "4", "--golden", str(golden))
        before = left(folder)
        done = hosts.run("node1", argv, cwd=str(folder), timeout_s=500)
        assert left(folder) == before and not list(small_storage.iterdir()), done.stderr
        assert "cannot be removed" not in done.stderr
    assert done.returncode == 77, done.stderr
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert {name: one["status"] for name, one in checks.items() if name not in ("configuration", "data")} == {
        "hosts": "warning",
        "storage": "failed",
        "steps": "ok",
        "resume": "ok",
        "cost": "failed",
        "golden": "warning",
        "spares": "warning",
    }
    assert "51 checkpoints need" in checks["storage"]["text"]
    for name in ("hosts", "golden", "spares"):
        assert "node3" in checks[name]["text"] and "node2" not in checks[name]["text"]
    assert "2 of 3 hosts compared" in checks["golden"]["text"]
