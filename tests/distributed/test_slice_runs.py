"""Do checks of slices find wrong sums, states and updates of the optimizer, and leave healthy runs alone?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from whole_runs import (
    MODELS,
    checked,
    end_of,
    events_of,
    pretrain_rank,
    sizes_of,
    train_run,
    verdicts_of,
    write_run,
)

from megasdc.ops.run_folder.summary import summarize_run
from megasdc.sdc.incident import incident_from_json

pytestmark = pytest.mark.distributed

WHOLE = 1_000_000
CHECKED = checked(coverage="one", parameters=False, finite=False, slice_elements=WHOLE)
AFTER_NORM = {"optimizer_hooks": [{"hook": "absolute", "theta": 1e-6, "where": "after_norm"}]}


def _write(tmp_path: Path, data: Path, name: str, **changes: Any) -> Path:
    return write_run(tmp_path, data, name, **{**CHECKED, **changes})


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 1), {}),
        ((1, 1, 3), {"deepspeed__bf16": {"enabled": True}, "model": MODELS["llama"]}),
        ((2, 1, 2), {"drop_compute": {"enabled": True, "threshold": 60.0}, **AFTER_NORM}),
        ((1, 2, 2), {"optimizer_hooks": [{"hook": "absolute", "theta": 1e-3}]}),
    ],
    ids=["alone", "bf16_llama", "tp2_dropcompute_bounds_after_norm", "pp2_bounds"],
)
def test_a_healthy_run_is_the_run_without_checks(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    """Same bits and no verdict, with slices so small that all elements need several steps."""
    for name, more in {"plain": {"sdc": {}}, "checked": {}}.items():
        config = _write(tmp_path, data, name, **{**sizes_of(layout), **changes, **more})
        overrides = [] if name == "plain" else ["megasdc.sdc.always_on.slice_elements=700"]
        results = train_run(config, math.prod(layout), *overrides)
        assert [code for code, _ in results if code] == [], results
    assert end_of(tmp_path / "plain") == end_of(tmp_path / "checked")
    assert verdicts_of(tmp_path / "checked") == []
    (told,) = events_of(tmp_path / "checked", "start", "slices")
    assert told["elements"] == 700 and told["period"] > 6
    assert told["clipping"] == ("after_norm" not in str(changes)), "what a bound changes is not compared"


FAULT = {"submodule": "*.linear_fc1", "slot": "weight*", "once": True, "kind": "scale", "factor": 1.01}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("phase", "tier", "basis", "named"),
    [
        ("collective", "reduction", "mean of the replicas' gradients", False),
        ("reduced_grad", "reduction", "mean of the replicas' gradients", False),
        ("optimizer_state", "state", "own copy", True),
        ("update", "update", "referee", True),
    ],
)
def test_a_wrong_element_is_found_in_its_step(
    tmp_path: Path, data: Path, replicas: int, phase: str, tier: str, basis: str, named: bool
) -> None:
    """One element by one per cent: the rank is named where one can be, and else its data group is suspected."""
    rank = replicas - 1
    fault = {**FAULT, "steps": [4, 4], "phase": phase, "rank": rank}
    config = _write(tmp_path, data, "run", faults=[fault], deepspeed__train_batch_size=2 * replicas)
    results = train_run(config, replicas)
    assert len(events_of(tmp_path / "run", "fault", "injected")) == 1
    (verdict,) = verdicts_of(tmp_path / "run")
    if named:
        basis = "own results elsewhere" if phase == "update" and replicas == 1 else basis
        assert verdict == (4, tier, rank, "not_reproduced", basis, "repair")
        assert {code for code, _ in results} == {0}, results
        clean = _write(tmp_path, data, "clean", deepspeed__train_batch_size=2 * replicas)
        assert {code for code, _ in train_run(clean, replicas)} == {0}
        assert end_of(tmp_path / "clean") == end_of(tmp_path / "run"), "what was wrong was put right"
    else:
        assert verdict == (4, tier, 0 if replicas == 1 else None, "inconclusive", basis, "halt")
        assert {code for code, _ in results} == {73}, results
        assert "step 4 is the last, and is not saved" in results[0][1]
        incident = incident_from_json((tmp_path / "run" / "reports" / "incident_step_00000004.json").read_text())
        assert sorted(one.rank for one in incident.suspects) == list(range(replicas))
    page = (tmp_path / "run" / "reports" / "incident_step_00000004.html").read_text()
    assert "linear_fc1" in page


STATE = {"phase": "optimizer_state", "submodule": "*", "once": True, "kind": "bit_flip", "bits": [20]}
FLIPS = {"decay": "*.exp_avg", "no_decay": "*bias.exp_avg_sq"}
"""A moment of one parameter of each group of the optimizer."""


@pytest.mark.parametrize(
    ("layout", "changes"),
    [((1, 3), {}), ((1, 3), {"deepspeed__bf16": {"enabled": True}}), ((2, 2), {})],
    ids=["dp3", "dp3_bf16", "pp2"],
)
def test_flips_in_the_moments_of_any_group_are_put_right(
    tmp_path: Path, data: Path, layout: tuple[int, int], changes: dict[str, Any]
) -> None:
    """Of one group, of the other, and of both in one step: the run ends with the bits of a run without them."""
    pipeline, replicas = layout
    world = pipeline * replicas
    at = [("decay", 3, world - 1), ("no_decay", 4, world - 2), ("decay", 5, 0), ("no_decay", 5, 0)]
    faults = [{**STATE, "steps": [step, step], "rank": rank, "slot": FLIPS[group]} for group, step, rank in at]
    sizes = {"parallel__pipeline": pipeline, "deepspeed__train_batch_size": 2 * replicas, **changes}
    for name, more in {"clean": {}, "run": {"faults": faults}}.items():
        config = _write(tmp_path, data, name, **{**sizes, **more})
        assert {code for code, _ in train_run(config, world)} == {0}
    assert len(events_of(tmp_path / "run", "fault", "injected")) == 4
    found = [(3, world - 1), (4, world - 2), (5, 0)]
    verdict = "not_reproduced", "own copy", "repair"
    assert verdicts_of(tmp_path / "run") == [(step, "state", rank, *verdict) for step, rank in found]
    assert end_of(tmp_path / "clean") == end_of(tmp_path / "run")
    (told,) = events_of(tmp_path / "run", "start", "slices")
    assert told["period"] == 1


@pytest.mark.parametrize(("phase", "tier"), [("optimizer_state", "state"), ("update", "update")])
def test_what_may_be_more_than_a_slice_is_not_called_repaired(
    tmp_path: Path, data: Path, phase: str, tier: str
) -> None:
    """Slices of a third of a shard: whether the rest is right is not known, and the run ends and says so."""
    fault = {
        **STATE,
        "phase": phase,
        "slot": "*.exp_avg",
        "once": False,
        "elements": 100_000,
        "rank": 1,
        "steps": [3, 3],
    }
    config = _write(tmp_path, data, "run", faults=[fault], deepspeed__train_batch_size=4)
    results = train_run(config, 2, "megasdc.sdc.always_on.slice_elements=5000")
    assert {code for code, _ in results} == {73}, results
    verdicts = verdicts_of(tmp_path / "run")
    assert [(one[1], one[2], one[-1]) for one in verdicts] == [(tier, 1, "halt")]
    assert "the step cannot be repaired, since a slice is 5000 elements" in results[0][1]
    assert "Nothing is saved that is verified: the next start begins at step 1" in results[0][1]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_clipped_gradient_is_held_against_the_one_before(tmp_path: Path, data: Path, bf16: bool) -> None:
    """One element of a shard after clipping: the update is computed again from the gradient before it."""
    fault = {**FAULT, "steps": [4, 4], "phase": "clipped_grad", "rank": 1}
    sizes = {
        "deepspeed__train_batch_size": 4,
        "deepspeed__bf16": {"enabled": bf16},
        "deepspeed__gradient_clipping": 0.1,
    }
    for name, faults in {"clean": [], "run": [fault]}.items():
        config = _write(tmp_path, data, name, faults=faults, **sizes)
        assert {code for code, _ in train_run(config, 2)} == {0}
    assert verdicts_of(tmp_path / "run") == [(4, "update", 1, "not_reproduced", "referee", "repair")]
    assert end_of(tmp_path / "clean") == end_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("replicas", "slot", "looks", "bf16", "named"),
    [
        (3, "0.lr", True, False, "relative to the majority"),
        (2, "0.lr", False, True, "own settings of the step before"),
        (2, "1.eps", True, True, "own settings of the step before"),
        (2, "0.step", True, False, "own settings of the step before"),
        (3, "0.weight_decay", False, False, "relative to the majority"),
    ],
)
def test_a_rank_that_steps_with_other_settings_is_found(
    tmp_path: Path, data: Path, replicas: int, slot: str, looks: bool, bf16: bool, named: str
) -> None:
    """However little it changes; in the step where slices look, else before the next is committed.

    Of two replicas it is the one that contradicts its own step before, or the schedule that it follows.
    """
    bit = 22 if slot.endswith("step") else 3
    fault = {"phase": "hyperparameter", "slot": slot, "rank": 1, "steps": [4, 4], "kind": "bit_flip", "bits": [bit]}
    sizes = {"deepspeed__train_batch_size": 2 * replicas, "deepspeed__bf16": {"enabled": bf16}}
    config = _write(tmp_path, data, "run", faults=[fault], **sizes)
    others = ["megasdc.sdc.always_on.slice_elements=null", "megasdc.sdc.always_on.parameters=true"]
    results = train_run(config, replicas, *([] if looks else others))
    assert len(events_of(tmp_path / "run", "fault", "injected")) == 1
    assert {code for code, _ in results} == {73}, results
    verdict = (4 if looks else 5, "settings", 1, "inconclusive", named, "halt")
    assert verdicts_of(tmp_path / "run") == [verdict]
    assert events_of(tmp_path / "run", "sdc", "slices_within_rounding") == []
    (finding,) = events_of(tmp_path / "run", "sdc", "finding")
    assert len(finding["values"]) == replicas and finding["ranks"] == [1]


@pytest.mark.parametrize(("phase", "named"), [("reduced_grad", 1), ("collective", None)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_right_copy_elsewhere_names_the_owner(
    tmp_path: Path, data: Path, replicas: int, phase: str, named: int | None
) -> None:
    """bf16 with fp32 gradients: each rank has the whole sum; where all have it wrong, nobody is named."""
    fault = {**FAULT, "steps": [4, 4], "phase": phase, "rank": 1, "factor": 3.0}
    sizes = {"deepspeed__train_batch_size": 2 * replicas, "deepspeed__bf16": {"enabled": True}}
    config = _write(tmp_path, data, "run", faults=[fault], **sizes)
    assert {code for code, _ in train_run(config, replicas)} == {73}
    basis = "mean of the replicas' gradients" if named is None else "referee"
    assert verdicts_of(tmp_path / "run") == [(4, "reduction", named, "inconclusive", basis, "halt")]
    page = (tmp_path / "run" / "reports" / "incident_step_00000004.html").read_text()
    assert "linear_fc1" in page


def test_a_change_as_small_as_rounding_is_found_alone(tmp_path: Path, data: Path) -> None:
    """One replica: the lowest bit of a master, which no repeat shows again, is no rounding."""
    fault = {**FAULT, "steps": [4, 4], "phase": "update", "slot": "weight.master", "rank": 0}
    fault = {**fault, "kind": "bit_flip", "bits": [0]}
    del fault["factor"]
    config = _write(tmp_path, data, "run", faults=[fault], deepspeed__train_batch_size=2)
    assert train_run(config, 1) == [(0, None)]
    assert verdicts_of(tmp_path / "run") == [(4, "update", 0, "not_reproduced", "own results elsewhere", "repair")]
    assert events_of(tmp_path / "run", "sdc", "slices_within_rounding") == []


def _without_copies(config: str) -> tuple[int, str | None]:
    """Body of a rank that keeps no copy of the state for the next step, as where the cadence has just changed."""
    from megasdc.sdc.slice_checks import UpdateSlices

    keep = UpdateSlices.snapshot
    UpdateSlices.snapshot = lambda self, turn: keep(self, None)  # type: ignore[method-assign]
    return pretrain_rank(config, [])


def test_nothing_is_called_repaired_where_the_state_at_rest_was_not_compared(tmp_path: Path, data: Path) -> None:
    """Whether the state had changed before the update is not known then."""
    fault = {**FAULT, "steps": [4, 4], "phase": "update", "slot": "weight.master", "rank": 0}
    config = _write(tmp_path, data, "run", faults=[fault], deepspeed__train_batch_size=2)
    ((code, error),) = run_distributed(_without_copies, 1, str(config), init=False)
    assert code == 73 and "was not kept on all ranks" in str(error)
    assert verdicts_of(tmp_path / "run") == [(4, "update", 0, "not_reproduced", "own results elsewhere", "halt")]


def test_the_first_step_of_a_start_finds_the_state_that_was_loaded(tmp_path: Path, data: Path) -> None:
    """Nothing comes before it that could have kept a copy, but the start itself."""
    config = _write(tmp_path, data, "run", deepspeed__train_batch_size=2, checkpoint={"interval": 3})
    assert train_run(config, 1, "megasdc.training.stop_step=3") == [(0, None)]
    fault = {**FAULT, "steps": [4, 4], "phase": "optimizer_state", "rank": 0}
    config = _write(tmp_path, data, "run", faults=[fault], deepspeed__train_batch_size=2, checkpoint={"interval": 3})
    assert train_run(config, 1) == [(0, None)]
    assert verdicts_of(tmp_path / "run") == [(4, "state", 0, "not_reproduced", "own copy", "repair")]


def _with_rounding_elsewhere(config: str) -> tuple[int, str | None]:
    """Body of a rank on which a master of the weights is one step of rounding off wherever elements are moved."""
    from megasdc.sdc.slice_checks import Update

    again = Update.again

    def rounded(self: Update, *, moved: bool = False) -> torch.Tensor:
        found = again(self, moved=moved)
        if moved and found.shape[1] > 2000:
            found[0, 0] = torch.nextafter(found[0, 0], torch.tensor(torch.inf))
        return found

    Update.again = rounded  # type: ignore[method-assign]
    return pretrain_rank(config, [])


@pytest.mark.parametrize("slot", [None, "weight.exp_avg_sq"])
def test_rounding_hides_no_fault(tmp_path: Path, data: Path, slot: str | None) -> None:
    """The first look that finds a kernel to round otherwise elsewhere still finds what rounding does not explain."""
    fault = {**FAULT, "steps": [1, 1], "phase": "update", "slot": slot, "rank": 0}
    config = _write(tmp_path, data, "run", faults=[fault] if slot else [], deepspeed__train_batch_size=2)
    assert run_distributed(_with_rounding_elsewhere, 1, str(config), init=False) == [(0, None)]
    (told,) = events_of(tmp_path / "run", "sdc", "slices_within_rounding")
    assert told["step"] == 1 and told["elements"] == [0]
    assert summarize_run(tmp_path / "run").weaker == [
        f"updates are compared within rounding since step 1, where {told['address']} differed each time"
    ]
    (covered,) = events_of(tmp_path / "run", "sdc", "coverage")
    assert any("update" in line and "within rounding since step 1" in line for line in covered["table"])
    verdict = (1, "update", 0, "not_reproduced", "own results elsewhere", "repair")
    assert verdicts_of(tmp_path / "run") == ([verdict] if slot else [])
