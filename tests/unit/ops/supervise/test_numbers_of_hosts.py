"""With how many hosts a run can go on: whole replicas, and the same samples each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.errors import ConfigError
from megasdc.ops.supervise.command import find_sizes, supervise_run

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OTHER = "megasdc.checkpoint.other_layout=convert"


def config_of(folder: Path, batch: dict[str, int], **sections: Any) -> Path:
    """A configuration whose data are not there: nothing reads them."""
    path = folder / "config.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    ours = {
        "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 2},
        "data": {"path": str(folder / "data")},
        "protect": "off",
        "training": {"steps": 10},
        "logging": {"run_dir": str(folder / "run")},
        **sections,
    }
    path.write_text(json.dumps({**batch, "optimizer": optimizer, "megasdc": ours}))
    return path


def hosts(count: int, slots: int = 1) -> dict[str, int]:
    """Hosts of so many ranks each."""
    return {f"node{number}": slots for number in range(count)}


@pytest.mark.parametrize(
    ("batch", "pipeline", "slots", "expected", "impossible"),
    [
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1}, 1, 1, {1: (), 2: (), 3: (), 4: ()}, {}),
        (
            {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3},
            *(1, 1, {1: (12, 1, 12), 2: (12, 1, 6), 3: (12, 1, 4), 4: ()}, {}),
        ),
        (
            {"train_batch_size": 8, "gradient_accumulation_steps": 2},
            *(1, 1, {1: (8, 1, 8), 2: (8, 1, 4), 3: (8, 1, 3), 4: ()}, {}),
        ),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            *(1, 1, {1: (8, 2, 4), 2: (8, 2, 2), 3: (8, 2, 2), 4: ()}, {}),
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1},
            *(2, 1, {2: (), 4: ()}, {1: "does not divide the world size 1", 3: "does not divide the world size 3"}),
        ),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}, 2, 2, {1: (), 2: (), 3: (), 4: ()}, {}),
    ],
)
def test_the_numbers_of_hosts_that_are_possible(
    tmp_path: Path,
    batch: dict[str, int],
    pipeline: int,
    slots: int,
    expected: dict[int, tuple[int, ...]],
    impossible: dict[int, str],
) -> None:
    """Batch sizes follow where the configuration gives all; samples of a step and of a micro-batch stay as many."""
    config = config_of(tmp_path, batch, parallel={"pipeline": pipeline})
    sizes, problems = find_sizes(config, [], hosts(4, slots), 4, 1)
    settings = {
        size: (OTHER, *(f"{name}={count}" for name, count in zip(BATCH, counts, strict=False)))
        for size, counts in expected.items()
    }
    assert sizes == settings
    assert problems.keys() == impossible.keys() and all(text in problems[size] for size, text in impossible.items())


def test_a_run_that_is_not_asked_to_needs_all_its_hosts(tmp_path: Path) -> None:
    """Nothing is set then, and the hosts may differ."""
    config = config_of(tmp_path, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1})
    assert find_sizes(config, [], {"a": 1, "b": 2}, 2, None) == ({2: ()}, {})


@pytest.mark.parametrize(
    ("slots", "least", "sections", "said"),
    [
        ({"a": 1, "b": 2}, 1, {}, "hosts of equal slots; a has 1, b has 2"),
        ({"a": 1, "b": 1}, 3, {}, "got 3, but the run has 2 hosts"),
        (
            {"a": 1, "b": 1},
            1,
            {"audit": {"enabled": True}, "determinism": {"enabled": True}},
            "the run needs all 2: with 1: megasdc.audit.enabled",
        ),
        ({"a": 1, "b": 1}, 1, {"checkpoint": {"storage": "node_local"}}, "is lost with one of them"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, slots: dict[str, int], least: int, sections: dict[str, Any], said: str
) -> None:
    """Before anything starts, with the reason."""
    batch = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    config = config_of(tmp_path, batch, supervise={"min_hosts": least}, **sections)
    with pytest.raises(ConfigError, match=said):
        find_sizes(config, [], slots, 2, least)


def test_a_replica_of_local_sgd_is_not_supervised_alone(tmp_path: Path) -> None:
    """Before a journal is begun, with the command that starts all."""
    batch = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    config = config_of(tmp_path, batch, local_sgd={"replicas": 2, "every": 5}, checkpoint={"interval": 5})
    with pytest.raises(ConfigError, match="start all with megasdc launch --replicas 2"):
        supervise_run(config)
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"]
