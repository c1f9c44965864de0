"""Which configurations of Local-SGD are refused?"""

from __future__ import annotations

from typing import Any

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.load import parse_config

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"replica": 2}, {}, "local_sgd.replica: got 2 of 2; they count from 0"),
    ({}, {"training": {"steps": 42}}, "training.steps: got 42, which is no multiple of the 4"),
    ({}, {"training": {"eval_interval": 6}}, "training.eval_interval: got 6"),
    ({}, {"checkpoint": {"interval": 10}}, "checkpoint.interval: got 10"),
    (
        {},
        {"study": {"mode": "free_run", "replicas": 2}, "determinism": {"enabled": True}},
        "replicas of a study are others",
    ),
    (
        {},
        {"drop_compute": {"enabled": True, "samples": "discard", "compensation": "extra_steps"}},
        'got "extra_steps", which changes the steps or samples of one replica alone',
    ),
    (
        {},
        {"sdc": {"policy": {"persistent": "isolate"}}, "audit": {"enabled": True}, "determinism": {"enabled": True}},
        'got "isolate", after which a replica has another layout',
    ),
    ({}, {"checkpoint": {"other_layout": "convert"}}, 'got "convert", and ranks exchange the shards of one layout'),
    ({"outer_lr": 0.5}, {}, 'local_sgd.outer_lr: got 0.5, which has no effect with megasdc.local_sgd.outer "average"'),
    ({"max_drop_rate": 0.2}, {}, 'which has no effect with megasdc.local_sgd.threshold "inf"'),
    ({"threshold": "auto"}, {}, "got 10, and the run has 10 rounds, so that no threshold is ever used"),
]


def parse(section: dict[str, Any], sections: dict[str, Any]) -> None:
    """Parse a run of two replicas with rounds of four steps."""
    own: dict[str, Any] = {
        "data": {"path": "data"},
        "protect": "off",
        "training": {"steps": 40, "eval_interval": 20},
        "logging": {"run_dir": "runs/x"},
        "checkpoint": {"interval": 20},
        "local_sgd": {"replicas": 2, "every": 4, **section},
    }
    merged = {name: {**own.get(name, {}), **value} for name, value in sections.items()}
    parse_config({"train_micro_batch_size_per_gpu": 1, "megasdc": {**own, **merged}})


@pytest.mark.parametrize(("section", "sections", "said"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(section: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    """Each names its fields, their values, and why."""
    with pytest.raises(ConfigError) as raised:
        parse(section, sections)
    assert said in str(raised.value)


def test_what_fits_is_taken() -> None:
    """The outer optimizer's settings, drops within a replica, and a threshold that some rounds have."""
    parse({"outer": "nesterov", "outer_lr": 0.5, "outer_momentum": 0.8}, {"drop_compute": {"enabled": True}})
    parse({"threshold": "auto", "window_rounds": 9, "max_drop_rate": 0.2}, {})
    parse({"threshold": 3.0, "deadline_s": 5000.0}, {})
