"""Samples of the benchmarks of DropCompute: they run, and what they print follows from what was run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.bench.commands import app
from tools.bench.drops.local_sgd import TOLERANCE
from tools.bench.drops.options import DropTrainOptions, Setting
from tools.bench.drops.training import PATTERN, train_all
from tools.bench.drops.training_setup import draw, run_config
from tools.bench.rank import run_in_ranks
from tools.bench.small.gpt import SmallGpt, prepare_library

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def test_a_sample_of_the_cost(tmp_path: Path) -> None:
    """A decision costs the messages that the layout needs, every part is timed, and short micro-batches have no bar."""
    out = tmp_path / "cost.json"
    small = ["--steps", "2", "--delay", "0.02", "--micro-batches", "3", "--hidden", "64"]
    done = CliRunner().invoke(app, ["dropcompute", *small, "--out", str(out)])
    assert done.exit_code == 0, done.output
    alone, pipe = json.loads(out.read_text())["layouts"]
    assert (alone["layout"], pipe["layout"]) == ([1, 1, 2], [2, 2, 1])
    assert (alone["messages_per_micro_batch"], pipe["messages_per_micro_batch"]) == (0, 3)  # a peer, and two of stage 1
    assert (alone["bytes_reduced_per_step"], pipe["bytes_per_micro_batch"]) == (16, 24)
    for one in (alone, pipe):
        assert len(one["steps"]) == 2 and one["bar"] is None and one["passed"]
        assert 0 < one["share"]["median"] < 1 and one["step_s"] > 3 * 0.02 and one["micro_batch_s"] > 0.02
        for step in one["steps"]:
            assert step["parts"]["marks"] > 0 and step["parts"]["count, exchange, log"] > 0
            assert sum(step["parts"].values()) < step["wall_s"]
    assert alone["parts"]["decide, send"] > 0 and alone["parts"]["hear"] == 0
    assert f"{100 * pipe['share']['median']:.4f}" in done.output


def test_a_sample_of_the_speedup(tmp_path: Path) -> None:
    """A threshold is chosen for each share and by a run itself, and the exit code says whether the bar was missed."""
    out = tmp_path / "speedup.json"
    small = ["--steps", "3", "--replicas", "2", "--micro-batches", "3", "--drop-rates", "0.2", "--constant", "0.01"]
    done = CliRunner().invoke(app, ["drop-speedup", *small, "--mean", "0.05", "--out", str(out)])
    assert out.exists(), (done.output, done.exception)
    found = json.loads(out.read_text())
    given, own = found["thresholds"]
    assert (given["own"], own["own"]) == (False, True)
    assert 0 < given["tau_s"] < 3 * (0.01 + 0.05 * 12)
    for one in (given, own):
        assert 0 <= one["rate"] < 0.67 and 0 < one["predicted"] < 3 and one["speedup"] > 0
        assert f"{one['speedup']:.3f}" in done.output
    assert 0.1 < found["sleep_share"] <= 1
    larger = found["larger_batch"]
    assert 3 <= larger["micro_batches"] <= 4 and larger["speedup"] > 0 and 0.5 < larger["completed"] < 1.5
    assert larger["passed"] == (abs(larger["completed"] - 1) <= 0.01)
    within = all(abs(one["difference"]) <= 0.05 for one in found["thresholds"])
    assert found["passed"] == (within and larger["passed"])
    assert done.exit_code == int(not found["passed"]), done.output


def test_a_sample_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run uses the samples that were drawn for it; finished runs are not made again."""
    out, log = tmp_path / "training.json", tmp_path / "runs.jsonl"
    small = ["--steps", "6", "--seeds", "1", "--rates", "0.3", "--evaluations", "2", "--eval-samples", "4"]
    small += ["--hidden", "32", "--layers", "1", "--sequence", "16", "--micro-batches", "4", "--replicas", "2"]
    small += ["--log", str(log), "--out", str(out)]
    done = CliRunner().invoke(app, ["drop-training", *small])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    gpt = SmallGpt(32, 1, 16, 1024, micro_batches=4)
    options = DropTrainOptions(6, 1, (0.3,), 2, gpt, evaluations=2, eval_samples=4)
    runs = {Setting(**run["setting"]): run for run in found["runs"]}
    assert list(runs) == options.settings
    for setting, run in runs.items():
        drawn = draw(options, setting, 1)
        assert run["samples"] == drawn.completed[: run["steps"]].sum()
        assert (run["steps"] > 6) == (setting.compensation == "extra_steps")
        assert [point[0] for point in run["losses"]][:2] == [3, 6]
    losses = {setting: run["losses"][-1][1] for setting, run in runs.items()}
    assert losses[Setting(0.0)] != losses[Setting(0.3)]
    assert found["verdict"] in " ".join(done.output.split())

    def run_in_ranks(*_: object) -> None:
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr("tools.bench.drops.training.run_in_ranks", run_in_ranks)
    again = CliRunner().invoke(app, ["drop-training", *small])
    assert again.exit_code == 0, again.output
    assert json.loads(out.read_text())["runs"] == found["runs"]


def test_all_replicas_train_as_rows_of_one_batch(tmp_path: Path) -> None:
    """Losses are those of as many ranks that drop the same by DropCompute, and the steps to equal loss are told."""
    out = tmp_path / "all.json"
    small = ["--steps", "6", "--seeds", "1", "--rates", "0.45", "--evaluations", "3", "--eval-samples", "4"]
    small += ["--hidden", "32", "--layers", "1", "--sequence", "16", "--micro-batches", "6", "--replicas", "2"]
    done = CliRunner().invoke(app, ["drop-training", "--all-train", *small, "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(out.read_text())
    gpt = SmallGpt(32, 1, 16, 1024, micro_batches=6)
    options = DropTrainOptions(6, 1, (0.45,), 2, gpt, evaluations=3, eval_samples=4, all_train=True)
    none, late = options.settings
    drawn = draw(options, late, 1)
    assert drawn.completed.shape == (6, 2) and (drawn.completed < 6).any()
    assert [run["samples"] for run in found["runs"]] == [72, drawn.completed.sum()]
    data = prepare_library(tmp_path / "data", gpt.vocab, PATTERN)
    configs = []
    for number, setting in enumerate((none, late)):
        decisions = tmp_path / f"decisions_{number}.jsonl"
        draw(options, setting, 1).write(decisions, gpt.micro_batches)
        configs.append(run_config(options, data, tmp_path / f"run_{number}", setting, 1, decisions))
    ranks = run_in_ranks(train_all, {"configs": configs, "rows": [None, None]}, 2, tmp_path)
    for run, wanted in zip(found["runs"], ranks, strict=True):
        assert run["samples"] == wanted["samples"]
        assert [loss for _, loss in run["losses"]] == pytest.approx([loss for _, loss in wanted["losses"]], rel=1e-5)
    assert found["equal_loss"] and found["verdict"] in " ".join(done.output.split())


@pytest.mark.full
def test_a_sample_of_local_sgd(tmp_path: Path) -> None:
    """All four ways are trained, exchanged bytes are those of the shards, and the exit code says whether a speed was
    predicted.
    """
    out = tmp_path / "local.json"
    done = CliRunner().invoke(app, ["local-sgd", "--rounds", "8", "--out", str(out)])
    assert out.exists(), (done.output, done.exception)
    sync, drops, local, both = json.loads(out.read_text())["modes"]
    assert sync["predicted"] is None and not sync["fetched"] and sync["dropped"] == local["dropped"] == 0
    assert local["fetched"] == both["fetched"] > 0 and drops["speed"] > 0 < both["eval_loss"] < 7
    found = json.loads(out.read_text())
    predicted = [one for one in found["modes"] if one["predicted"] is not None]
    within = all(abs(one["speed"] / one["predicted"] - 1) <= TOLERANCE for one in predicted)
    assert len(predicted) == 3 and found["passed"] == within == (done.exit_code == 0)


@pytest.mark.full
def test_a_sample_of_faults_in_local_sgd(tmp_path: Path) -> None:
    """NaN and a spike are left out, the others go on with equal bits, and clean rounds have all."""
    out = tmp_path / "faults.json"
    done = CliRunner().invoke(
        app, ["local-sgd-faults", "--values", "2", "--times", "0", "--clean", "4", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [one["kind"] for one in found["faults"]] == ["NaN", "spike"] and found["clean"] == 4


def test_a_sample_of_partial_backward_passes(tmp_path: Path) -> None:
    """Losses are of the runs, one micro-batch is never dropped whole, and gradients reach the last layers first."""
    out = tmp_path / "partial.json"
    small = ["--steps", "4", "--seeds", "1", "--micro-batches", "1", "--late", "0.5", "--gradient-steps", "6"]
    small += ["--replicas", "2", "--eval-samples", "4", "--hidden", "32", "--layers", "2", "--sequence", "16"]
    done = CliRunner().invoke(app, ["drop-partial", *small, "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(out.read_text())
    rows = {(row["micro_batches"], row["kind"]): row for row in found["rows"]}
    assert list(rows) == [(1, kind) for kind in ("none", "micro_batch", "backward")]
    none, whole, ended = (rows[1, kind] for kind in ("none", "micro_batch", "backward"))
    assert whole["lost"] == 0 and whole["loss"] == none["loss"] != ended["loss"]
    assert 0 < ended["lost"] < 0.5 and ended["time"] < 1 == whole["time"]
    gradients = next(run["gradients"] for run in found["runs"] if run["kind"] == "gradients")
    assert [part["layer"] for part in gradients["backward"]] == ["embedding", "layer 1", "layer 2", "final norm"]
    for part in gradients["micro_batch"]:
        assert part["size"] == pytest.approx(1, abs=1e-9) and part["error"] == 0
    last = gradients["backward"][-1]
    assert last["size"] == pytest.approx(1, abs=1e-6) and last["error"] < 1e-6, "every pass reaches the final norm"
