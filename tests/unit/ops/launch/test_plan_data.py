"""What a plan gives the ranks and asks of the hosts: all prepared data, and the options of the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megasdc.common.errors import ConfigError
from megasdc.ops.launch.front import launch_run
from megasdc.ops.launch.plan import plan_launch
from megasdc.ops.launch.request import LaunchRequest

BLEND = Path(__file__).parents[4] / "configs" / "blend.json"


def test_every_folder_of_a_blend_is_looked_for(tmp_path, monkeypatch):
    """The plan lists the folders of all parts among what a host reads, below the working folder."""
    monkeypatch.chdir(tmp_path)
    plan = plan_launch(LaunchRequest(BLEND, num_gpus=2), lambda text: None)
    folders = [str(tmp_path / "prepared" / name) for name in ("stdlib_modules", "stdlib_packages")]
    assert list(plan.needs.readable)[-2:] == folders
    alone = plan_launch(LaunchRequest(BLEND, num_gpus=2, overrides=("megasdc.data.blend=[]",)), lambda text: None)
    assert list(alone.needs.readable)[-1:] == folders[:1] and folders[1] not in alone.needs.readable


def test_options_that_mean_nothing_on_one_host_are_told(tmp_path, monkeypatch):
    """Ranks of one host meet at 127.0.0.1 and nothing goes over SSH: another address and a port get a line each."""
    monkeypatch.chdir(tmp_path)
    told = []
    for arguments in (("--master_addr", "10.0.0.7", "--ssh_port=2222"), ("--master_addr=127.0.0.1",), ()):
        plan_launch(LaunchRequest(BLEND, num_gpus=2, launcher_args=arguments), told.append)
    assert [line.partition(":")[0] for line in told] == [
        "--master_addr 10.0.0.7 is not used",
        "--ssh_port 2222 is not used",
    ]


def test_ranks_are_told_which_fields_may_be_changed(tmp_path, monkeypatch):
    """--allow-changed reaches every rank beside the overrides; a name without meaning ends the plan."""
    monkeypatch.chdir(tmp_path)
    names = ("megasdc.model.hidden_dropout", "train_batch_size")
    request = LaunchRequest(BLEND, num_gpus=2, overrides=("megasdc.training.steps=9",), allow_changed=names)
    plan = plan_launch(request, lambda text: None)
    assert plan.rank.arguments[2:] == [
        *("--set", "megasdc.training.steps=9"),
        *("--allow-changed", names[0], "--allow-changed", names[1]),
    ]
    with pytest.raises(ConfigError, match="hidden_dropuot"):
        plan_launch(replace(request, allow_changed=("hidden_dropuot",)), lambda text: None)


def test_a_replica_is_not_launched_alone(tmp_path, monkeypatch):
    """A configuration with replicas is refused before anything starts, or is written, where nobody leads them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGASDC_ROUNDS", raising=False)
    request = LaunchRequest(BLEND.with_name("local_sgd.json"), num_gpus=1)
    remedy = r"local_sgd.replicas: got 2, .* with megasdc launch --replicas 2, or set null"
    with pytest.raises(ConfigError, match=remedy):
        launch_run(request)
    assert not list(tmp_path.iterdir())
