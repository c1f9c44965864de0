"""Hundreds of launches of real training that meet each other or are killed: none hangs, none leaves a process behind.

Minutes a case, so outside the usual tests. ``MEGASDC_TRIALS`` is the number of trials of each case; 30 without it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from test_launch_train import folder, steps_done

from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.parallel.local_ranks import free_port

__all__ = ["folder"]
pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(0)]

TRIALS = int(os.environ.get("MEGASDC_TRIALS", "30"))
LIMIT_S = 120.0
"""From a kill until nothing is left: far above what it takes, far below the ranks' timeout of 600 s."""
HOSTS = ["node1", "node2"]
TRIAL_VARIABLE = "MEGASDC_TRIAL"
ROLES = ["front", "runner", "node", "rank 0", "rank 1"]


class Launches:
    """Starts launches on this host or on two test hosts, and sees their processes."""

    def __init__(self, folder: Path, cluster: Cluster | None) -> None:
        self.folder = folder
        self.cluster = cluster
        self._pid_spaces = (
            {os.readlink(f"/proc/{pid}/ns/pid") for pid in cluster._first_pid.values()} if cluster else {}
        )

    def start(self, log: Path, run_dir: Path, steps: int, *launcher_args: str) -> subprocess.Popen[bytes]:
        """Start one, with its output in a file."""
        place = ["--num-gpus", "2"] if self.cluster is None else ["--hostfile", str(self.cluster.hostfile(HOSTS))]
        argv = [sys.executable, "-m", "megasdc", "launch", *place, "--config", str(self.folder / "config.json")]
        for value in (f"logging.run_dir={run_dir}", f"training.steps={steps}", "parallel.timeout_s=600"):
            argv += ["--set", f"megasdc.{value}"]
        argv += ["--", *launcher_args]
        env = {TRIAL_VARIABLE: str(self.folder), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            if self.cluster is None:
                options = {"cwd": self.folder, "env": {**os.environ, **env}, "stdin": subprocess.DEVNULL}
                return subprocess.Popen(argv, stdout=out, stderr=out, **options)
            return self.cluster.popen("node1", argv, cwd=str(self.folder), env=env, stdout=out, stderr=out)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All processes of launches, by role; those of no role under ``other``."""
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and self._is_ours(process):
                    found.setdefault(self._role(process), []).append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        if self.cluster is None:
            return process.environ().get(TRIAL_VARIABLE) == str(self.folder)
        words = " ".join(process.cmdline())
        return ("megasdc" in words or "pretrain_gpt" in words) and (
            os.readlink(f"/proc/{process.pid}/ns/pid") in self._pid_spaces
        )

    @staticmethod
    def _role(process: psutil.Process) -> str:
        words = process.cmdline()
        if not words or not Path(words[0]).name.startswith("python"):
            return "other"
        names = {"megasdc.ops.launch.runner": "runner", "megasdc.ops.launch.node": "node", "launch": "front"}
        if role := next((role for word, role in names.items() if word in words[:5]), None):
            return role
        is_rank = any(word == "megasdc.ops.launch.rank" or word.endswith("pretrain_gpt.py") for word in words)
        return f"rank {process.environ().get('RANK')}" if is_rank else "other"

    def wait_until_none(self, limit_s: float) -> dict[str, list[int]]:
        """Processes that are left after that time, by role."""
        end = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        return {role: [process.pid for process in some] for role, some in left.items()}


@pytest.fixture(params=[1, 2], ids=["one host", "two hosts"])
def launches(request: pytest.FixtureRequest, folder: Path) -> Iterator[Launches]:
    """On this host, or on two."""
    with ExitStack() as stack:
        cluster = None
        if request.param == 2:
            if reason := unavailable_reason():
                pytest.skip(reason)
            env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
            cluster = stack.enter_context(Cluster(folder / "cluster", 2, env=env))
        found = Launches(folder, cluster)
        yield found
        for processes in found.processes().values():
            for process in processes:
                process.kill()


@pytest.mark.parametrize("victim", ROLES)
def test_killed_at_any_moment(launches: Launches, folder: Path, victim: str) -> None:
    """SIGKILL at a random time of start or training: all ends soon, and the next start on the same port goes on."""
    choose = random.Random(f"{victim} {os.environ.get('PYTHONHASHSEED', '')}")
    options, run_dir = ["--master_port", str(free_port())], folder / "run"
    if victim == "runner":
        options.append("--log_level=info")  # on one host it runs for such an option alone
    ready_s, counts = 0.0, {"starting": 0, "training": 0}
    for trial in range(TRIALS):
        log = folder / f"{trial}.log"
        before = len(steps_done(folder))
        began = time.monotonic()
        process = launches.start(log, run_dir, 1_000_000, *options)
        if not ready_s:
            while len(steps_done(folder)) <= before:
                assert process.poll() is None and time.monotonic() - began < LIMIT_S, log.read_text()
                time.sleep(0.2)
            ready_s = time.monotonic() - began
        time.sleep(max(0.0, began + choose.uniform(0, 1.2 * ready_s) - time.monotonic()))
        while not (victims := launches.processes().get(victim, [])):
            assert process.poll() is None and time.monotonic() - began < LIMIT_S, log.read_text()
        os.kill(choose.choice(victims).pid, signal.SIGKILL)
        killed = time.monotonic()
        counts["training" if len(steps_done(folder)) > before else "starting"] += 1
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"trial {trial}: the front hangs after {victim} was killed\n{log.read_text()[-5000:]}")
        left = launches.wait_until_none(LIMIT_S if victim == "front" else 1.0)
        said = log.read_text(errors="replace")
        assert not left, f"trial {trial}: {left} outlived {victim}\n{said[-5000:]}"
        assert code != 0, said[-5000:]
        assert "is in use" not in said and "another launch" not in said, said[-5000:]
        print(f"{victim} trial {trial}: code {code}, all gone after {time.monotonic() - killed:.1f} s", flush=True)
    last = folder / "last.log"
    process = launches.start(last, run_dir, len(steps_done(folder)) + 5, *options)
    assert process.wait(LIMIT_S) == 0, last.read_text()[-5000:]
    print(f"{victim}: {TRIALS} of {TRIALS} trials, killed while {json.dumps(counts)}")


@pytest.mark.parametrize("ports", ["one port", "default ports", "one folder"])
def test_two_at_once(launches: Launches, folder: Path, ports: str) -> None:
    """Two launches at the same moment: on ports of their own both train; on one port, or in one folder, one does."""
    # Hosts that are reached over SSH share DeepSpeed's default port.
    shared = ports != "default ports" or launches.cluster is not None
    steps = 100 if shared else 4  # long enough that the second one comes while the first one trains
    codes_seen: dict[str, int] = {}
    for trial in range(TRIALS * 5 // 3):
        port = ["--master_port", str(free_port())] if ports == "one port" else []
        runs = [folder / f"run {trial} {name}" for name in ("aa" if ports == "one folder" else "ab")]
        logs = [folder / f"log {trial} {name}" for name in "ab"]
        processes = [launches.start(log, run, steps, *port) for log, run in zip(logs, runs, strict=True)]
        try:
            codes = [process.wait(2 * LIMIT_S) for process in processes]
        except subprocess.TimeoutExpired:
            pytest.fail(f"trial {trial} hangs\n" + "\n".join(log.read_text()[-3000:] for log in logs))
        told = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
        assert sorted(codes) == ([0, 78] if shared else [0, 0]), told
        for run, log, code in zip(runs, logs, codes, strict=True):
            if code == 0:
                metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                assert [line["step"] for line in metrics if "train/loss" in line] == list(range(1, steps + 1))
            else:
                assert ports == "one folder" or not (run / "metrics.jsonl").exists()
                assert "is in use" in log.read_text() or "another launch uses" in log.read_text(), told
        assert not launches.wait_until_none(1.0)
        codes_seen[str(sorted(codes))] = codes_seen.get(str(sorted(codes)), 0) + 1
    print(f"two at once, {ports}: {codes_seen}")
