"""Which studies are refused, and what is the configuration of one replica?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout, replica_config
from megasdc.config.load import RunConfig, parse_config

FREE: dict[str, Any] = {"mode": "free_run", "replicas": 2}
ENDING = {"granularity": "backward", "gradients": "computed"}


def config_of(study: dict[str, Any], **sections: Any) -> RunConfig:
    """A small run with a study; sections are merged over the defaults."""
    own: dict[str, Any] = {
        "data": {"path": "data"},
        "protect": "off",
        "training": {"steps": 10, "eval_interval": 5},
        "determinism": {"enabled": True},
        "logging": {"run_dir": "runs/x"},
        "study": study,
    }
    deepspeed = sections.pop("deepspeed", {})
    merged = {
        name: {**own.get(name, {}), **value} if isinstance(value, dict) else value for name, value in sections.items()
    }
    return parse_config({"train_micro_batch_size_per_gpu": 1, **deepspeed, "megasdc": {**own, **merged}})


SYNC = {"mode": "computation_sync", "replicas": 2}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"replicas": 2}, {}, "study.replicas: got 2, which has no effect with megasdc.study.mode null"),
    ({"interval": 3}, {}, "study.interval: got 3, which has no effect with megasdc.study.mode null"),
    ({"mode": "free_run"}, {}, "study.replicas: missing"),
    ({**FREE, "replicas": 1}, {}, "study.replicas: got 1; allowed"),
    ({**FREE, "trusted": 2}, {}, "study.trusted: got 2, but the replicas are 0 to 1"),
    (
        {**FREE, "submodules": ["*"]},
        {},
        'study.submodules: got ["*"], which has no effect with megasdc.study.mode "free_run"',
    ),
    (
        {"mode": "parameter_sync", "replicas": 2, "interval": 2},
        {},
        'study.interval: got 2, which has no effect with megasdc.study.mode "parameter_sync"',
    ),
    (
        {**SYNC, "submodules": ["*.linear_fc3"]},
        {},
        "study.submodules.0: got '*.linear_fc3', which matches no submodule",
    ),
    (FREE, {"determinism": {"enabled": False}}, "with megasdc.determinism.enabled false"),
    (FREE, {"training": {"eval_interval": 0}}, "with megasdc.training.eval_interval 0"),
    (FREE, {"drop_compute": {"enabled": True}}, "with megasdc.drop_compute.enabled true"),
    (
        FREE,
        {"drop_compute": {"enabled": True, "replay_decisions": "d", **ENDING}},
        'with megasdc.drop_compute.granularity "backward"; backward passes that end at different layers',
    ),
    (FREE, {"checkpoint": {"keep_last": 1}}, "with megasdc.checkpoint.keep_last 1"),
    (SYNC, {"sdc": {"always_on": {"enabled": True}}}, "with megasdc.sdc.always_on.enabled true; micro-batches that"),
    (
        {**SYNC, "replicas": 4},
        {"audit": {"enabled": True}},
        "with megasdc.audit.enabled true; micro-batches that one replica recomputes",
    ),
    (
        FREE,
        {"delay": [{"kind": "slow_rank", "replica": 1, "delay_s": 0.1}]},
        "with megasdc.delay 1 entries",
    ),
]


@pytest.mark.parametrize(("study", "sections", "message"), REFUSED, ids=[text for *_, text in REFUSED])
def test_what_contradicts_a_study_is_refused(study: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    """One problem, that names the field, the value and the remedy."""
    with pytest.raises(ConfigError) as caught:
        config_of(study, **sections)
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize("mode", ["computation_sync", "parameter_sync", "free_run"])
def test_good_studies(mode: str) -> None:
    """Each mode alone is accepted, and survives the round trip."""
    config = config_of({"mode": mode, "replicas": 3, "trusted": 2})
    assert parse_config(config.resolved()) == config


def test_the_launch_is_cut() -> None:
    """The layout is that of one replica; other numbers of ranks and faults elsewhere are refused, with all numbers."""
    config = config_of({**FREE, "replicas": 3}, parallel={"tensor": 2}, model={"vocab_multiple": 128})
    layout = check_layout(config, 12)
    assert (layout.replicas, layout.world_size, layout.data) == (3, 4, 2)
    with pytest.raises(ConfigError, match=r"3 replicas of tensor 2 x pipeline 1 = 6 does not divide the world size 8"):
        check_layout(config, 8)
    harmed = config_of(FREE, faults=[{"replica": 2}])
    with pytest.raises(ConfigError, match=r"faults.0.replica: got 2, but there are 2 .* in each of 2 replicas"):
        check_layout(harmed, 4)
    audited = config_of(FREE, audit={"enabled": True})
    with pytest.raises(ConfigError, match="start at least 4 ranks"):
        check_layout(audited, 2)
    assert check_layout(audited, 4).data == 2


def test_a_replica_is_an_ordinary_run() -> None:
    """Own folders, own faults under own seeds, own monitor names; nothing else differs from the file's settings."""
    config = config_of(
        FREE,
        checkpoint={"folder": "saved"},
        faults=[{"replica": 1}, {"phase": "backward"}, {"replica": 0, "seed": 5}],
        process_faults=[{"kind": "exit", "replica": 0}],
        deepspeed={"tensorboard": {"enabled": True, "job_name": "me"}},
        logging={"run_dir": "runs/x", "prometheus": "127.0.0.1:9400"},
    )
    first, second = (replica_config(config, replica) for replica in (0, 1))
    assert second.megasdc.logging.run_dir == str(Path("runs/x/replica_1"))
    assert second.megasdc.checkpoint.folder == str(Path("saved/replica_1"))
    assert [spec.phase for spec in second.megasdc.faults] == ["forward", "backward"]
    assert [spec.seed for spec in first.megasdc.faults] == [0, 5]
    assert all(spec.seed == 1 << 32 and spec.replica is None for spec in second.megasdc.faults)
    assert (len(first.megasdc.process_faults), len(second.megasdc.process_faults)) == (1, 0)
    assert second.deepspeed["tensorboard"]["job_name"] == "me_replica_1"
    assert (first.megasdc.study.mode, first.megasdc.logging.progress_bar) == (None, True)
    assert not second.megasdc.logging.progress_bar
    assert (first.megasdc.logging.prometheus, second.megasdc.logging.prometheus) == ("127.0.0.1:9400", None)
    assert parse_config(second.resolved()) == second
