"""Has each replica of a launch GPUs and folders of its own?"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megasdc.common.errors import ConfigError, LaunchError
from megasdc.config.load import load_config
from megasdc.localsgd.rounds import Round
from megasdc.ops.launch import replicas
from megasdc.ops.launch.front import launch_run
from megasdc.ops.launch.replicas import (
    ReplicaEnd,
    ReplicasResult,
    command_of_replica,
    describe,
    devices_of_replicas,
    launch_replicas,
    request_of_replica,
)
from megasdc.ops.launch.request import LaunchRequest

VISIBLE = "CUDA_VISIBLE_DEVICES"


def parts(ranks: int | None, number: int = 2, *, share: bool = False) -> list[str | None]:
    """What each replica sees."""
    request = LaunchRequest(Path("run.json"), num_gpus=ranks)
    return [one.get(VISIBLE) for one in devices_of_replicas(request, number, share=share)]


def test_replicas_of_a_host_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In order, from those that may be used; too few are refused with what helps, unless ranks share them."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(replicas, "DEVICES", tmp_path)
    assert parts(3) == [None, None], "there is none"
    for device in range(8):
        (tmp_path / f"nvidia{device}").touch()
    (tmp_path / "nvidiactl").touch()
    assert parts(3) == ["0,1,2", "3,4,5"] and parts(None) == ["0,1,2,3", "4,5,6,7"]
    monkeypatch.setenv(VISIBLE, "4,5,7")
    assert parts(1, 3) == ["4", "5", "7"] and parts(2, share=True) == [None, None]
    with pytest.raises(LaunchError, match=r"2 replicas of 2 ranks need a GPU each, and 3 are here; .*share_devices"):
        parts(2)
    monkeypatch.setenv(VISIBLE, "")
    assert parts(2) == [None, None], "the processor computes"
    monkeypatch.setenv(VISIBLE, "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert parts(2) == [None, None]


def test_replicas_save_in_folders_of_their_own(tmp_path: Path) -> None:
    """Also where the configuration names a folder of checkpoints."""
    path = tmp_path / "run.json"
    raw = {
        "model": {"preset": "gpt2-1m"},
        "data": {"path": "data"},
        "logging": {"run_dir": "runs/a"},
        "training": {"steps": 9},
    }
    path.write_text(json.dumps({"megasdc": {**raw, "checkpoint": {"folder": "saved"}}}))
    sections = load_config(path).megasdc
    request = LaunchRequest(path, launcher_args=("--ssh_port", "22"))
    words = command_of_replica(request_of_replica(request, 1, 2, sections))
    assert {"megasdc.checkpoint.folder=saved/replica_1", "megasdc.logging.run_dir=runs/a/replica_1"} < set(words)
    assert words[-3:] == ["--", "--ssh_port", "22"]


def test_what_would_not_meet_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Hosts of unequal ranks, rounds of another number of replicas, and a folder that holds another kind of run."""
    path, hostfile, rounds, folder = (tmp_path / name for name in ("run.json", "hosts", "rounds.jsonl", "runs"))
    raw = {"model": {"preset": "gpt2-1m"}, "data": {"path": "data"}, "training": {"steps": 9, "eval_interval": 0}}
    raw |= {"local_sgd": {"every": 3}, "checkpoint": {"interval": 0}, "logging": {"run_dir": str(folder)}}
    path.write_text(json.dumps({"megasdc": raw}))
    hostfile.write_text("a slots=2\nb slots=1\n")
    one = Round(1, (0, 2), *({0: 1, 2: 1} for _ in range(3)), {0: 1.0, 2: 1.0}, {1: "far"}, (), 1.0)
    rounds.write_text(json.dumps(one.as_dict()) + "\n")
    with pytest.raises(LaunchError, match="would have 2, 1 ranks on their hosts"):
        launch_replicas(LaunchRequest(path, hostfile), 2)
    replays = (f"megasdc.local_sgd.replay_rounds={rounds}",)
    with pytest.raises(ConfigError, match="is of 3 replicas, and --replicas 2"):
        launch_replicas(LaunchRequest(path, overrides=replays), 2)
    assert not folder.exists()
    folder.mkdir()
    (folder / "rounds.jsonl").touch()
    with pytest.raises(ConfigError, match=f"{folder} holds replicas of Local-SGD"):
        launch_run(LaunchRequest(path, num_gpus=1, overrides=("megasdc.local_sgd={}",)), dry_run=True)
    (folder / "resolved.json").touch()
    with pytest.raises(ConfigError, match=f"{folder} holds a run of its own"):
        launch_replicas(LaunchRequest(path, num_gpus=1), 2)
    assert sorted(one.name for one in folder.iterdir()) == ["resolved.json", "rounds.jsonl"]


def test_the_end_says_which_rounds_are_not_of_all() -> None:
    """And who has not ended well."""
    ends = (ReplicaEnd(0, 0, "runs/a/replica_0", 1), ReplicaEnd(1, 78, "runs/a/replica_1", 4))
    said = describe(ReplicasResult(78, "runs/a", 9, 3, ends))
    assert said == "runs/a: 9 rounds, 3 of this launch without all replicas; replica 1 exit code 78"
    assert describe(ReplicasResult(0, "runs/a", 9, 0, ends[:1])) == "runs/a: 9 rounds; all replicas are done"
    said = describe(ReplicasResult(0, "runs/a", 9, 0, ends[:1], signal.SIGINT))
    assert said == "runs/a: 9 rounds; stopped by SIGINT, all replicas saved and are done"
