"""A sample of `python -m tools.bench train`: it runs, and its numbers are those of its blocks, whatever their size."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from megasdc.common.errors import ConfigError, MegasdcError
from tools.bench.commands import app
from tools.bench.rank import run_in_ranks
from tools.bench.small.drill import prepare_texts
from tools.bench.statistics import Cost
from tools.bench.training import launch_time
from tools.bench.training.launch_time import COLD, COMMANDS, WARM, measure_launches
from tools.bench.training.options import TrainBenchOptions
from tools.bench.training.steps import _Turns, bar_of, bench_train
from tools.bench.training.steps_rank import compare

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

SMALL = {"blocks": 2, "steps_per_block": 2, "micro_batch": 1, "hidden": 64, "layers": 1, "sequence": 32, "vocab": 500}
PARTS = ["launcher", "imports", "checks", "groups", "model", "engine", "data", "resume", "first_step"]


@pytest.mark.parametrize("against", ["plain", "hf", "determinism", "bounds"])
def test_comparison(forked_ranks, against):
    """Both loops take the same steps; ratios, rates and verdict follow from the blocks; our own have equal bits."""
    told = []
    result = bench_train(TrainBenchOptions(**SMALL), (against,), on_progress=lambda *call: told.append(call))
    (found,) = result.comparisons
    ours = np.array([pair[0].wall_s for pair in found.costs])
    other = np.array([pair[1].wall_s for pair in found.costs])
    assert len(found.costs) == 2 and (ours > 0).all() and all(cost.cpu_s > 0 for pair in found.costs for cost in pair)
    assert found.ratios["wall"].median == pytest.approx(float(np.median(ours / other)))
    assert found.tokens_per_s[0] == pytest.approx(2 * 2 * 2 * 32 / float(np.median(ours)))
    ours_in, other_in = found.library_shares
    assert 0 < ours_in < 0.9 and 0 < other_in < 0.9, "a part of a step, and there is more to it"
    outside = found.step_s[0] * (1 - ours_in), found.step_s[1] * (1 - other_in)
    assert found.outside_library == pytest.approx(outside[0] / outside[1])
    assert told[-1] == (f"against {against}", 2, 2)
    if against == "determinism":
        assert found.passed and found.bar is None
    if against == "bounds":
        assert found.bar is None and bar_of("bounds", TrainBenchOptions(accumulation=8)) == 1.01
        assert found.first_losses[0] == found.first_losses[1], "the first step has nothing to bound"
    elif against != "hf":
        assert found.difference is None
        assert found.first_losses[0] == found.first_losses[1] and found.last_losses[0] == found.last_losses[1]
    else:
        assert found.first_losses == pytest.approx([np.log(500)] * 2, abs=0.2)
    printed = Console(record=True, width=160)
    result.render(printed)
    text = printed.export_text()
    assert f"{found.ratios['wall'].median:.4f}" in text and f"{found.parameters:,} parameters" in text
    assert f"{ours_in:.1%} : {other_in:.1%} of a step" in text
    assert json.loads(json.dumps(result.as_dict()))["passed"] == result.passed


@pytest.mark.parametrize(("difference", "code"), [("rank 0: loss of step 3", 1), (None, 0)])
def test_command_reports_and_judges(monkeypatch, tmp_path, difference, code):
    """The exit code is the verdict: 1 when bits differ, whatever the times; the file holds every block."""
    from tools.bench.training import steps

    def answer(function, arguments, ranks, folder, **_):
        side = {"parameters": 5, "library_share": 0.5, "first_loss": 1.0, "last_loss": 1.0}
        side["costs"] = [Cost(1.0, 1.0)]
        return [{"sides": [side, side], "difference": difference}]

    monkeypatch.setattr(steps, "run_in_ranks", answer)
    out = tmp_path / "result.json"
    done = CliRunner().invoke(app, ["train", "--against", "plain", "--blocks", "1", "--json", "--out", str(out)])
    assert done.exit_code == code, done.output
    written = json.loads(out.read_text())
    assert written["passed"] is (code == 0) and len(written["comparisons"][0]["costs"]) == 1
    assert {"date", "cpu", "cores", "versions"} <= written["machine"].keys()


def wrong_options():
    """Options that only a rank finds wrong, when it makes its configuration."""
    options = TrainBenchOptions(**SMALL)
    object.__setattr__(options, "sequence", "no such length")
    return options


def test_a_failed_rank_is_reported(tmp_path):
    """A rank that fails ends the benchmark with the end of its output, and leaves no process waiting."""
    arguments = {"options": wrong_options(), "against": "plain", "folder": tmp_path}
    with pytest.raises(MegasdcError, match="no such length"):
        run_in_ranks(compare, arguments, 2, tmp_path, lambda message: None)


def test_a_loop_that_fails_ends_the_loop_that_waits_for_it(forked_ranks):
    """Loops in ranks of their own: the error is that of the side that failed, and the other side is ended."""
    with pytest.raises(MegasdcError, match="no such length"):
        bench_train(wrong_options(), ("hf",))


def test_turns_change_from_pair_to_pair():
    """Blocks of two sides never overlap, and either begins every other pair; a failure ends who waits."""
    order, told, running = [], [], []
    turns = _Turns(3, told.append)

    def side(number):
        for _ in range(3):
            turns.acquire(number)
            running.append(number)
            order.append(list(running))
            time.sleep(0.01)
            running.remove(number)
        turns.release(number)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(side, number) for number in (1, 0)]:
            done.result()
    assert order == [[0], [1], [1], [0], [0], [1]] and told == [0, 1, 1, 2, 2, 3]
    turns = _Turns(1, told.append)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(turns.acquire, 1)
        turns.fail()
        with pytest.raises(MegasdcError, match="the other loop failed"):
            waits.result()


def test_wrong_options_are_refused():
    """Sizes that cannot be are refused before anything starts, all of them at once."""
    with pytest.raises(ConfigError) as error:
        TrainBenchOptions(blocks=0, hidden=100)
    assert len(error.value.problems) == 2


@pytest.mark.end_to_end
@pytest.mark.parametrize("command", COMMANDS)
def test_time_to_first_step(tmp_path, command):
    """Either launcher is run, and every part from the command to the first step is there."""
    found = launch_time._launch_once(tmp_path, "run", command, prepare_texts(tmp_path), 1, 1)
    assert list(found) == PARTS
    assert all(seconds >= 0 for seconds in found.values())


def test_launches_take_turns_and_the_first_do_not_count(monkeypatch, tmp_path):
    """Each command in turn, several times; medians are those of the launches after the first ones."""
    launched, told = [], []

    def launch(folder, name, command, data, ranks, threads):
        launched.append((name, command))
        return {part: float(len(launched) * (part == "model") + 1) for part in PARTS}

    monkeypatch.setattr(launch_time, "_launch_once", launch)
    monkeypatch.setattr(launch_time, "prepare_library", lambda folder, *_, **__: folder)
    found = measure_launches(COMMANDS, 2, 2, 1, tmp_path, told.append)
    ours, other = COMMANDS
    names = [(f"run_{repeat}_{place}", command) for repeat in range(3) for place, command in enumerate(COMMANDS)]
    assert launched == names and told == [1, 2, 3, 4, 5, 6]
    assert list(found) == [ours, other]
    once = measure_launches(COMMANDS, 1, 2, 1, tmp_path, lambda done: None)[ours]
    assert once["total"].count == 1 and list(once["phases"]) == PARTS
    for launch, first, medians in ((found[ours], 1, 4), (found[other], 2, 5)):
        assert list(launch["phases"]) == PARTS and launch["dominates"] == "model"
        assert launch["phases"]["model"].median == medians + 1
        assert launch["total"].median == sum(value.median for value in launch["phases"].values())
        assert launch["first_launch_s"] == len(PARTS) + first and len(launch["samples"]) == 2


@pytest.mark.full
@pytest.mark.end_to_end
def test_time_to_first_step_with_and_without_compiled_code(tmp_path):
    """A cold start compiles the fused functions into a folder of its own each time, a warm one into none."""
    found = measure_launches((WARM, COLD), 1, 1, 1, tmp_path, lambda done: None)
    assert list(found) == [WARM, COLD]
    compiled = [path.name for path in tmp_path.glob("*_compiled") if list(path.rglob("*.so"))]
    assert sorted(compiled) == ["run_0_1_compiled", "run_1_1_compiled"]
    for name in ("run_1_0", "run_1_1"):
        assert json.loads((tmp_path / name / "resolved.json").read_text())["megasdc"]["model"]["fuse"] is True
