"""Do audits inside one device find a unit that is wrong each time, name its rank, and leave healthy runs alone?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import (
    MODELS,
    end_of,
    events_of,
    train_run,
    verdicts_of,
    write_run,
)

from megasdc.checkpoint.verify import list_verified
from megasdc.sdc.incident import incident_from_json

pytestmark = pytest.mark.distributed

AUDITED: dict[str, Any] = {
    "determinism": {"enabled": True},
    "audit": {"enabled": True, "interval": 2, "permuted": True},
    "checkpoint__interval": 3,
}
UNIT: dict[str, Any] = {"bound_to": "unit", "same_elements": True, "kind": "scale", "factor": 1.5, "steps": [4, None]}


def _write(tmp_path: Path, data: Path, name: str, **changes: Any) -> Path:
    return write_run(tmp_path, data, name, **{**AUDITED, **changes})


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, set()),
        ({"deepspeed__bf16": {"enabled": True}, "model": MODELS["llama"]}, set()),
        (
            {"parallel__tensor": 2, "deepspeed__pipeline": {"activation_checkpoint_interval": 1}},
            {"_scaled_dot_product_flash_attention_for_cpu_backward", "scatter_add_"},  # of one head; of the loss
        ),
        (
            {"parallel__pipeline": 2, "model": {**MODELS["gpt"], "hidden_dropout": 0.1, "attention_dropout": 0.1}},
            {"bernoulli_", "native_dropout"},
        ),
        (
            {
                "parallel__pipeline": 2,
                "deepspeed__bf16": {"enabled": True},
                "deepspeed__pipeline": {"activation_checkpoint_interval": 1},
                "drop_compute": {"enabled": True, "threshold": "inf"},
            },
            set(),
        ),
    ],
    ids=["fp32", "bf16_llama", "tp2_recompute", "pp2_dropout", "pp2_gated_bf16_recompute"],
)
def test_a_healthy_run_is_the_run_without_audits(
    tmp_path: Path, data: Path, changes: dict[str, Any], left: set[str]
) -> None:
    """One replica: same bits, no verdict, checkpoints are verified, and what could not be moved is told."""
    ranks = changes.get("parallel__tensor", 1) * changes.get("parallel__pipeline", 1)
    for name, more in {"plain": {"audit": {"enabled": False}}, "audited": {}}.items():
        results = train_run(_write(tmp_path, data, name, **{**changes, **more}), ranks)
        assert [code for code, _ in results if code] == [], results
    assert end_of(tmp_path / "plain") == end_of(tmp_path / "audited")
    assert verdicts_of(tmp_path / "audited") == []
    assert len(events_of(tmp_path / "audited", "audit", "agreed")) == 4
    assert list_verified(tmp_path / "audited" / "checkpoints")
    rows = [json.loads(line) for line in (tmp_path / "audited" / "metrics.jsonl").read_text().splitlines()]
    replayed = [row["step"] for row in rows if "sdc/replay_hidden_share" in row]
    assert replayed == [4, 6], "by each stage alone, but for the first audit"
    (tried,) = events_of(tmp_path / "audited", "audit", "permuted")
    assert {name.split(".")[0] for name in tried["not_kept"]} <= {"aten::sum"}, "48 columns are no multiple of 32"
    assert sum(tried["moved"].values()) > 40, "fused modules have fewer"
    assert {name.partition("::")[2].partition(".")[0] for name in tried["left"]} <= left


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        ((1, 1, 1), {"submodule": "*.linear_fc2", "rank": 0}),
        ((1, 1, 1), {"submodule": "*.linear_qkv", "phase": "backward", "rank": 0}),
        ((1, 1, 1), {"submodule": "*.linear_fc1", "phase": "weight_grad", "rank": 0}),
        ((2, 1, 1), {"submodule": "*.mlp.activation", "rank": 1}),
        ((1, 2, 1), {"submodule": "*.input_layernorm", "rank": 1}),
        ((1, 1, 2), {"submodule": "*.linear_proj", "rank": 1}),
    ],
    ids=["fc2", "backward", "weight_grad", "tp2", "pp2", "dp2"],
)
def test_a_unit_that_is_always_wrong_is_named(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], place: dict[str, Any]
) -> None:
    """Each repeat shows the same two values: persistent, and nothing of the step is committed."""
    tensor, pipeline, replicas = layout
    settings = {"parallel__tensor": tensor, "parallel__pipeline": pipeline, "faults": [{**UNIT, **place}]}
    results = train_run(_write(tmp_path, data, "run", **settings), tensor * pipeline * replicas)
    assert {code for code, _ in results} == {73}, results
    expected = (4, "permuted", place["rank"], "persistent", "own results elsewhere", "halt")
    assert verdicts_of(tmp_path / "run")[0] == expected
    incident = incident_from_json((tmp_path / "run" / "reports" / "incident_step_00000004.json").read_text())
    (named,) = incident.flagged
    assert (named.rank, named.repeats, named.wrong_repeats) == (place["rank"], 5, 5)
    assert named.first.phase == place.get("phase", "forward") and named.first.fqn.endswith(place["submodule"][2:])
    assert "elements in other places" in (tmp_path / "run" / "reports" / "incident_step_00000004.html").read_text()


def test_a_fault_of_one_time_is_repaired(tmp_path: Path, data: Path) -> None:
    """The run ends with the bits of one without it."""
    once = {**UNIT, "once": True, "steps": [4, 4], "submodule": "*.linear_fc2", "rank": 0}
    for name, faults in {"clean": [], "harmed": [once]}.items():
        assert train_run(_write(tmp_path, data, name, faults=faults), 1) == [(0, None)]
    assert verdicts_of(tmp_path / "harmed") == [(4, "permuted", 0, "not_reproduced", "own results elsewhere", "repair")]
    assert end_of(tmp_path / "clean") == end_of(tmp_path / "harmed")


def test_what_moves_with_the_values_is_not_seen(tmp_path: Path, data: Path) -> None:
    """The documented limit: wrong each time for these values, wherever they are computed."""
    fault = {**UNIT, "bound_to": "values", "submodule": "*.linear_fc2", "rank": 0}
    assert train_run(_write(tmp_path, data, "run", faults=[fault]), 1) == [(0, None)]
    assert verdicts_of(tmp_path / "run") == [] and len(events_of(tmp_path / "run", "fault", "injected")) > 2
