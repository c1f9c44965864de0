"""Is the drift of runs what NumPy says, at any layouts, and is the first divergent step named?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser, choose, needs_browser
from hand_made import VOCABULARY, make_whole, write_checkpoint
from typer.testing import CliRunner

from megasdc.cli.compare import checkpoints_script as app
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.drift import measure_drift
from megasdc.lab.checkpoints.drift_report import submodule_of
from megasdc.lab.checkpoints.report import Options
from megasdc.model.kinds import submodule_kind
from megasdc.tensors.bits import distance

QKV, FC1 = "2.layer.self_attention.linear_qkv.weight", "3.layer.mlp.linear_fc1.weight"


def drifted(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """The state of a run that is wrong from step 2 on: one weight at step 2, many at step 3."""
    whole = make_whole(step)
    if step >= 2:
        whole["weight"][QKV][1, 2] += 0.25
    if step >= 3:
        whole["weight"][FC1] *= 1.125
        whole["weight"]["4.norm.weight"][3] = -whole["weight"]["4.norm.weight"][3]
    return whole


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: good over steps 1 to 4, bad at another layout over 1 to 3, moved with step 3 and 5 alone."""
    folder = tmp_path_factory.mktemp("runs")
    for step in range(1, 5):
        write_checkpoint(folder / "good", step, layout=(2, 2, 2))
    for step in range(1, 4):
        write_checkpoint(folder / "bad", step, layout=(1, 1, 3), whole=drifted(step))
    for step in (3, 5):
        write_checkpoint(folder / "moved", step, layout=(2, 1, 1))
    return folder


def reference(step: int, slot: str, wanted: Any) -> float:
    """||theta - theta_ref|| / ||theta_ref|| by NumPy in float64, of the real vocabulary entries."""
    good, bad = make_whole(step)[slot], drifted(step)[slot]
    pairs = [(good[name].double().numpy(), bad[name].double().numpy()) for name in good if wanted(name)]
    a, b = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


def kind(name: str) -> str:
    """The coarse kind of a parameter's submodule, by the catalogue."""
    found = submodule_kind(submodule_of(name))
    return {"qkv": "attention", "projection": "attention", "fc1": "mlp", "fc2": "mlp", "final_norm": "norm"}.get(
        found, found
    )


def test_numbers_are_those_of_numpy(runs: Path) -> None:
    """Whole, by kind and by submodule, over layouts; what is equal in every bit is exactly zero and said so."""
    report = measure_drift([runs / "good", runs / "bad"])
    assert [one.step for one in report.steps] == [1, 2, 3]
    assert report.problems == []
    for one in report.steps:
        assert one.slot == "weight"
        assert one.whole.relative == pytest.approx(reference(one.step, "weight", lambda _: True), rel=1e-12)
        for name, found in one.groups.items():
            wanted = reference(one.step, "weight", lambda fqn, name=name: kind(fqn) == name)
            assert found.relative == pytest.approx(wanted, rel=1e-12)
            assert found.equal is (wanted == 0.0)
        for name, found in one.submodules.items():
            wanted = reference(one.step, "weight", lambda fqn, name=name: submodule_of(fqn) == name)
            assert found.relative == pytest.approx(wanted, rel=1e-12)
    assert set(report.steps[0].groups) == {"embedding", "attention", "mlp", "norm", "head"}
    assert report.steps[1].whole.num_different == 1


def test_the_first_divergent_step_is_named(runs: Path) -> None:
    """With its submodules and the last equal step; steps that only one has are told and are no failure."""
    report = measure_drift([runs / "good", runs / "bad", runs / "moved"])
    found = report.as_dict()
    bad, moved = found["runs"]
    assert (bad["first_divergent_step"], bad["last_equal_step_before"]) == (2, 1)
    assert bad["first_divergent_submodules"] == ["2.layer.self_attention.linear_qkv"]
    assert moved["first_divergent_step"] is None
    assert [one["step"] for one in moved["steps"]] == [3]
    names = {Path(folder).name: steps for folder, steps in found["steps_lacking"].items()}
    assert names == {"good": [5], "bad": [4, 5], "moved": [1, 2, 4]}
    json.dumps(found, allow_nan=False)


def test_zero_nan_and_infinity_are_told_apart() -> None:
    """Zeros of both signs differ at distance 0; equal NaN and infinities are equal; a new NaN makes NaN."""
    ones = torch.tensor([0.0, 1.0, float("nan"), float("inf")])
    same = distance(ones.clone(), ones)
    assert (same.equal, same.relative) == (True, 0.0)
    signed = distance(torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert (signed.equal, signed.relative, signed.num_different) == (False, 0.0, 1)
    assert np.isnan(distance(torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])).relative)
    assert distance(torch.tensor([1.0]), torch.tensor([0.0])).relative == np.inf


def test_a_copy_that_differs_within_a_checkpoint_is_no_equality(runs: Path, tmp_path: Path) -> None:
    """The norm of the second tensor rank alone differs: the step is divergent, and the tensor is named."""
    path = write_checkpoint(tmp_path / "torn", 1, layout=(2, 1, 1))
    file = path / "layer_02-model_01-model_states.pt"
    state = torch.load(file, weights_only=False)
    state["layer.input_layernorm.weight"][0] += 1
    torch.save(state, file)
    (one,) = measure_drift([runs / "good", tmp_path / "torn"]).steps
    assert one.torn == ["2.layer.input_layernorm.weight"]
    assert not one.equal


def test_padding_of_the_vocabulary_is_left_out(runs: Path, tmp_path: Path) -> None:
    """Runs that pad the vocabulary to other sizes are compared over its real entries, which alone count."""
    whole = make_whole(1)
    for tensors in whole.values():
        for name in ("0.word_embeddings.weight", "5.output.weight"):
            tensors[name] = torch.cat((tensors[name][:VOCABULARY], torch.ones(36 - VOCABULARY, 8).to(tensors[name])))
    write_checkpoint(tmp_path / "padded", 1, whole=whole)
    (one,) = measure_drift([runs / "good", tmp_path / "padded"]).steps
    assert one.equal
    assert one.submodules["5.output"].numel == VOCABULARY * 8


def test_what_is_compared_can_be_chosen(runs: Path) -> None:
    """--only picks moments; only weights were drifted, so they are equal."""
    report = measure_drift([runs / "good", runs / "bad"], Options(only=("*/exp_avg",)))
    assert {one.slot for one in report.steps} == {"exp_avg"}
    assert report.same


def run(*arguments: object) -> Any:
    """The real command, in its drift mode."""
    return CliRunner().invoke(app, ["--drift", *map(str, arguments)])


def test_exit_codes(runs: Path, tmp_path: Path) -> None:
    """0 all equal, 1 not, 2 where something could not be compared; the rest is compared all the same."""
    assert run(runs / "good", runs / "moved").exit_code == 0
    different = run(runs / "good", runs / "bad")
    assert different.exit_code == 1
    assert "first divergent step 2" in different.stdout
    assert "does not keep step 4" in different.stdout
    assert "equal" in different.stdout
    assert run(runs / "bad", tmp_path).exit_code == 2
    lone = write_checkpoint(tmp_path / "lone", 9).parent
    assert "no step is kept by" in run(runs / "good", lone).output
    assert run(runs / "good", lone).exit_code == 2
    assert run(runs / "good", runs / "bad", "--ulp", 1).exit_code == 2
    broken = write_checkpoint(tmp_path / "broken", 1).parent
    write_checkpoint(broken, 2)
    file = broken / "step_00000001" / "layer_02-model_00-model_states.pt"
    file.write_bytes(file.read_bytes()[:100])
    answer = run(runs / "good", broken, "--json")
    assert answer.exit_code == 2
    found = json.loads(answer.stdout)
    assert file.name in found["not_compared"][0]
    assert [one["step"] for one in found["runs"][0]["steps"]] == [2]
    with pytest.raises(CheckpointError, match=r"a run folder|holds no checkpoints"):
        measure_drift([runs, runs / "good"])


@pytest.mark.slow
@needs_browser
def test_curves_are_drawn(browser: Browser, runs: Path, tmp_path: Path) -> None:
    """On a logarithmic axis, with marks where all is equal; one submodule can be chosen; on a phone and in the dark."""
    page = tmp_path / "drift.html"
    assert run(runs / "good", runs / "bad", runs / "moved", "--html", page).exit_code == 1
    browser.open(page, width=390, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.open(page)
    assert browser.run("document.body.innerText.trim()").startswith("1 of 2 runs part from")
    assert browser.run("find('curves').layout.yaxis.type") == "log"
    whole = "find('curves').data.filter(one => one.name === 'whole, run 1')"
    values = browser.run(f"{whole}.map(one => [one.x, one.y])")
    assert values[0][0] == [1, 2, 3]
    assert values[0][1][0] is None
    assert values[0][1][1:] == pytest.approx([reference(step, "weight", lambda _: True) for step in (2, 3)])
    assert values[1][0] == [1], "equal at step 1, so marked at the foot"
    choose(browser, "Of", "2.layer.self_attention.linear_qkv")
    assert browser.run("find('curves').data.length") == 4
    assert browser.run("find('curves').querySelectorAll('.scatterlayer .trace').length") > 0
    assert browser.errors == []
