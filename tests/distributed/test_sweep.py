"""Sweeps for real: whole runs forked from one server, killed and resumed, shared, diverged, not a number, failed."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from harness import StartedCommand
from typer.testing import CliRunner
from whole_runs import events_of, prepare_text, write_config

from megasdc.cli import app
from megasdc.common.errors import ConfigError, StorageError
from megasdc.lab.studies.choices import evaluate_choices
from megasdc.lab.sweeps.ma_tables import node_tables
from megasdc.lab.sweeps.results import read_sweep
from megasdc.lab.sweeps.sweep import alone, gather, open_sweep, run_sweep
from tools.identifier_task import write_task

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
LR = "optimizer.params.lr"
NODE = {"name": "n", "profile": "node_11", "seed": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of one rank over prepared text."""
    folder = tmp_path_factory.mktemp("base")
    data = prepare_text(folder)
    return write_config(folder / "base.json", data, folder / "unused", checkpoint={}, parallel__threads=1)


def write_sweep(folder: Path, base: Path, **fields: Any) -> Path:
    """A sweep file over the base; its last 2 steps are the final loss."""
    raw = {"name": "study", "base": str(base), "final_steps": 2, "diverged_above_frequencies": False, **fields}
    path = folder / "sweep.json"
    path.write_text(json.dumps(raw))
    return path


def starts_of(out: Path) -> Counter[str]:
    """How often each run was started, by the events of the runs themselves."""
    return Counter({run.name: len(events_of(run, "start", "run")) for run in (out / "runs").iterdir()})


def processes_in(out: Path) -> set[int]:
    """Processes that hold a file open below a folder, this one apart."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(f"{out}/runs/"):
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return found - {os.getpid()}


def wait_until(what: Callable[[], bool], seconds: float = 90.0) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def test_a_killed_sweep_goes_on_without_repeating_finished_runs(tmp_path: Path, base: Path) -> None:
    """After kill -9 of the runner no run goes on alone; resumed, and with a run killed, each finished run is kept."""
    out = tmp_path / "out"
    settings = {"megasdc.training.steps": 60, "megasdc.training.eval_interval": 0}
    path = write_sweep(tmp_path, base, set=settings, grid={LR: [1e-3, 2e-3]}, nodes=[NODE])
    runner = StartedCommand("megasdc", ["sweep", str(path), "--out", str(out), "--workers", "1", "--json"])
    try:
        wait_until(lambda: bool(list(out.glob("runs/*/result.json"))) and bool(processes_in(out)))
    finally:
        runner.kill()
    wait_until(lambda: not processes_in(out))
    finished = {path.parent.name for path in out.glob("runs/*/result.json")}
    assert 1 <= len(finished) < 4
    before = {name: (out / "runs" / name / "metrics.jsonl").read_bytes() for name in finished}

    killed: list[int] = []

    def kill_one(what: str, done: int, total: int) -> None:
        """Before the first run starts: have it killed as soon as it writes metrics."""
        if what == "runs" and not killed:
            command = [sys.executable, "-c", _KILL, str(out), str(os.getpid())]
            killer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert killer.stdout is not None
            killed.append(len(killer.stdout.readline()))  # it looks for the run from now on

    table = run_sweep(open_sweep(path, out=out), 1, progress=False, on_progress=kill_one)
    assert table.done == table.planned == 4
    counts = starts_of(out)
    assert all(counts[name] == 1 for name in finished)
    assert {name: (out / "runs" / name / "metrics.jsonl").read_bytes() for name in finished} == before
    assert len(events_of(out, "sweep", "run_killed")) == 1
    assert sum(counts.values()) <= 4 + 2  # the one that ran when the runner was killed, and the one killed alone
    assert {row["status"] for row in read_sweep(out).rows} == {"done"}
    for run_id in counts:  # whatever was cut off: each step once
        steps = [row["step"] for row in read_sweep(out).series([run_id], ["train/loss"]).to_pylist()]
        assert steps == list(range(1, 61))


_KILL = """
import os, signal, sys, time
from pathlib import Path
out, runner = sys.argv[1:]
print("ready", flush=True)
end = time.monotonic() + 200
while time.monotonic() < end:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            path, process = os.readlink(link), int(link.parts[2])
        except OSError:
            continue
        if path.startswith(out + "/runs/") and path.endswith("metrics.jsonl") and process != int(runner):
            os.kill(process, signal.SIGKILL)
            sys.exit()
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[Path, Path]:
    """A sweep of runs that end in every way: its file and its folder."""
    folder = tmp_path_factory.mktemp("swept")
    nan = {"phase": "forward", "submodule": "*.mlp.linear_fc2", "kind": "value", "value": "nan", "steps": [3, None]}
    cells = [
        {"name": "a"},
        {"name": "same", "set": {LR: 1e-2}},
        {"name": "wild", "set": {LR: 30.0}},
        {"name": "from a", "start": {"cell": "a", "step": 3}},
        {"name": "unstable", "start": {"cell": "a", "step": 3}, "set": {LR: 30.0}},
        {"name": "broken", "set": {"megasdc.process_faults": [{"kind": "exit", "exit_code": 9, "steps": [2, 2]}]}},
    ]
    nodes = [{"name": "nans", "faults": [nan]}]
    settings = {
        "megasdc.training.steps": 8,
        "megasdc.training.eval_interval": 8,
        "megasdc.training.max_skipped_steps": 4,
    }
    path = write_sweep(folder, base, set=settings, cells=cells, nodes=nodes)
    told: list[tuple[float | None, int, int]] = []
    run_sweep(open_sweep(path, out=folder / "out"), 2, progress=False, on_estimate=lambda *args: told.append(args))
    ((seconds, left, workers),) = told
    assert seconds is not None and seconds > 0 and (left, workers) == (11, 2)
    return path, folder / "out"


def test_every_ending_is_a_result(swept: tuple[Path, Path]) -> None:
    """Divergence, NaN and an exit code become statuses with reasons, beside runs that are done."""
    rows = {(row["cell"], row["node"]): row for row in read_sweep(swept[1]).rows}
    assert {place: row["status"] for place, row in rows.items()} == {
        ("a", "healthy"): "done",
        ("a", "nans"): "nan",
        ("same", "healthy"): "done",
        ("same", "nans"): "nan",
        ("wild", "healthy"): "diverged",
        ("wild", "nans"): "nan",
        ("from a", "healthy"): "done",
        ("from a", "nans"): "nan",
        ("unstable", "healthy"): "diverged",
        ("unstable", "nans"): "failed",
        ("broken", "healthy"): "failed",
        ("broken", "nans"): "failed",
    }
    assert "lowest" not in rows["wild", "healthy"]["reason"] and "above" in rows["wild", "healthy"]["reason"]
    assert "skipped 4 steps in a row" in rows["a", "nans"]["reason"]
    assert "exit code 9" in rows["broken", "healthy"]["reason"]
    healthy = rows["unstable", "healthy"]["run_id"]
    told = f"not run: from its checkpoint the healthy run {healthy} is not stable: the final loss"
    assert rows["unstable", "nans"]["reason"].startswith(told)
    assert all(row["reason"] == "" for row in rows.values() if row["status"] == "done")


def test_equal_cells_share_runs_and_all_runs_are_started_once(swept: tuple[Path, Path]) -> None:
    """Twelve rows come from nine runs, one that others start from, and one that an unstable healthy run forbids."""
    results = read_sweep(swept[1])
    ids = {(row["cell"], row["node"]): row["run_id"] for row in results.rows}
    assert ids["a", "healthy"] == ids["same", "healthy"] and ids["a", "nans"] == ids["same", "nans"]
    assert len(set(ids.values())) == 10
    starts = starts_of(swept[1])
    assert starts.pop(ids["unstable", "nans"]) == 0
    assert len(starts) == 10 and set(starts.values()) == {1}


def test_a_start_from_a_checkpoint_goes_on_as_the_run_that_saved_it(swept: tuple[Path, Path]) -> None:
    """The healthy run from step 3 of a cell has, from step 4 on, exactly the losses of that cell's healthy run."""
    results = read_sweep(swept[1])
    ids = {row["cell"]: row["run_id"] for row in results.rows if row["node"] == "healthy"}
    losses = {
        cell: {row["step"]: row["value"] for row in results.series([ids[cell]], ["train/loss"]).to_pylist()}
        for cell in ("a", "from a")
    }
    assert sorted(losses["from a"]) == [4, 5, 6, 7, 8]
    assert losses["from a"] == {step: loss for step, loss in losses["a"].items() if step > 3}


def test_weights_of_healthy_and_harmed_runs_are_continued(tmp_path: Path, base: Path) -> None:
    """Each run begins with the weights of its start at step 0, a healed one without faults; a lost node is not run."""
    nan = {"phase": "forward", "submodule": "*.mlp.linear_fc2", "kind": "value", "value": "nan", "steps": [2, None]}
    wrong = {"phase": "forward", "submodule": "*.mlp.linear_fc2", "slot": "output", "kind": "scale", "factor": 3.0}
    nodes = [{"name": "wrong", "faults": [{**wrong, "elements": 10}]}, {"name": "nans", "faults": [nan]}]
    steps = {"megasdc.training.steps": 4, "megasdc.training.eval_interval": 2, "megasdc.training.max_skipped_steps": 2}
    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}}}
    start = {"cell": "before", "step": 4, "weights": True}
    cells = [
        {"name": "before", "set": steps},
        {"name": "on the node", "set": {**steps, **warm}, "start": start},
        {"name": "healed", "set": {**steps, **warm}, "start": {**start, "of": "node"}},
    ]
    path = write_sweep(tmp_path, base, cells=cells, nodes=nodes, keep_checkpoints=True, diverged_rise=9.0)
    out = tmp_path / "out"
    run_sweep(open_sweep(path, out=out), 2, progress=False)
    rows = {(row["cell"], row["node"]): row for row in read_sweep(out).rows}
    ended = [rows[cell, node]["status"] for cell in ("before", "on the node", "healed") for node in ("wrong", "nans")]
    assert ended == ["done", "nan", "done", "nan", "done", "failed"]
    lost = rows["before", "nans"]["run_id"]
    assert rows["healed", "nans"]["reason"].startswith(f"not run: the run {lost} that it starts from is nan: ")
    assert starts_of(out)[rows["healed", "nans"]["run_id"]] == 0
    first = {place: losses_of(out, row["run_id"])[0] for place, row in rows.items() if row["status"] == "done"}
    assert {step for step, _ in first.values()} == {1}
    assert len(first) == 6 and len({loss for _, loss in first.values()}) == 5  # both cells share the healthy run
    config = json.loads((out / "runs" / rows["healed", "wrong"]["run_id"] / "config.json").read_text())
    weights = out / "runs" / rows["before", "wrong"]["run_id"] / "checkpoints/step_00000004"
    assert config["megasdc"]["model"]["initial_weights"] == str(weights) and not config["megasdc"]["faults"]
    # A rate of 0, that of the first two steps of the warm-up, keeps the weights: their loss at step 2 is the saved one.
    for cell, node, saver in (("healed", "wrong", "wrong"), ("healed", "healthy", "healthy")):
        kept = evals_of(out, rows[cell, node]["run_id"])[2]
        assert kept == pytest.approx(evals_of(out, rows["before", saver]["run_id"])[4], rel=1e-6)

    questions = tmp_path / "questions.jsonl"
    texts = [
        {"prompt": f"def f{i}(self", "choices": [")", ", x", " = 0", "import"], "answer": i % 4} for i in range(20)
    ]
    questions.write_text("\n".join(map(json.dumps, texts)))
    _check_tuned_runs(out, rows, questions)


def _check_tuned_runs(out: Path, rows: dict[tuple[str, str], dict[str, Any]], questions: Path) -> None:
    """The table of fine-tuning says of each run what `megasdc eval --choices` of its checkpoint says."""
    options = [str(out), "--questions", str(questions), "--json", "--ask", "healed"]
    said = StartedCommand("tools.finetune_table", options).wait(200)
    assert said.returncode == 0, said.stderr
    table = {(one["cell"], one["node"]): one for one in json.loads(said.stdout)}
    assert list(table) == [(cell, node) for cell in ("before", "on the node", "healed") for node in NODES_OF_TABLE]
    asked = {place for place, one in table.items() if one["accuracy"] is not None}
    assert asked == {("healed", "healthy"), ("healed", "wrong")}
    assert table["healed", "healthy"]["disagreement"] == 0
    folders = [out / "runs" / rows["healed", node]["run_id"] / "checkpoints" for node in ("wrong", "healthy")]
    found = evaluate_choices(folders[0], questions, against=folders[1])
    assert table["healed", "wrong"]["disagreement"] == found.disagreement
    assert table["healed", "wrong"]["accuracy"] == found.model.accuracy
    assert {place: one["status"] for place, one in table.items()} == {
        place: row["status"] for place, row in rows.items()
    }
    assert table["before", "nans"]["spikes"] == [
        step for step, loss in losses_of(out, rows["before", "nans"]["run_id"]) if loss != loss
    ]
    assert table["before", "nans"]["spikes"], "a loss that is not a number is a spike"
    wrong = StartedCommand("tools.finetune_table", [*options[:-1], "nothing"]).wait(200)
    assert wrong.returncode == 70 and "there is no cell 'nothing'; there are before" in wrong.stderr


def test_fine_tuning_as_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Size smoke of the shipped sweep: weights of a node go on, healed too; a table of its answers to the task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    made = write_task(Path("prepared/identifiers"), Path(email.__file__).parent, held_out=10)
    assert made["questions.jsonl"] == 40
    out = tmp_path / "out"
    done = run_sweep(open_sweep(Path("configs/sweeps/ma_finetune.json"), "smoke", out), 2, progress=False)
    assert done.done == done.planned == 10
    rows = {(row["cell"], row["node"]): row for row in read_sweep(out).rows}
    assert {row["status"] for row in rows.values()} == {"done"}
    options = ["--questions", "prepared/identifiers/questions.jsonl", "--ask", "task, healed"]
    said = StartedCommand("tools.finetune_table", [str(out), *options]).wait(200)
    assert said.returncode == 0, said.stderr
    lines = [line.strip("| ").split(" | ") for line in said.stdout.splitlines()[2:]]
    table = {(line[0], line[1]): line for line in lines}
    assert len(lines) == 10
    assert {place: line[4] for place, line in table.items()} == {
        place: f"{row['final_loss']:.4f}" for place, row in rows.items()
    }
    asked = [table["task, healed", node] for node in ("healthy", "node_11")]
    assert [line for line in lines if line[7] != "-"] == asked
    assert asked[0][8] == "0.0 %" and all(" to " in line[7] for line in asked)
    for row in rows.values():
        assert row["final_loss"] < losses_of(out, row["run_id"])[0][1]
    for corpus in ("other corpus", "task"):  # a node errs in fine-tuning too; a healthy run is the same, healed or not
        here, healed = (f"{corpus}, {how}" for how in ("on the node", "healed"))
        assert len({rows[cell, "healthy"]["run_id"] for cell in (here, healed)}) == 1
        assert len({rows[cell, node]["final_loss"] for cell in (here, healed) for node in ("healthy", "node_11")}) == 3


NODES_OF_TABLE = ("healthy", "wrong", "nans")


def losses_of(out: Path, run_id: str) -> list[tuple[int, float]]:
    """Steps of a run with their losses."""
    return [(row["step"], row["value"]) for row in read_sweep(out).series([run_id], ["train/loss"]).to_pylist()]


def evals_of(out: Path, run_id: str) -> dict[int, float]:
    """Validation losses of a run by step."""
    return {row["step"]: row["value"] for row in read_sweep(out).series([run_id], ["eval/loss"]).to_pylist()}


def test_tables_follow_from_what_the_runs_wrote(swept: tuple[Path, Path]) -> None:
    """Parquet holds the losses of the run folders; the final loss is the mean of the last 2 steps."""
    out = swept[1]
    row = next(row for row in pq.read_table(out / "results.parquet").to_pylist() if row["cell"] == "a")
    lines = [json.loads(line) for line in (out / "runs" / row["run_id"] / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert row["final_loss"] == pytest.approx(sum(losses[-2:]) / 2) and row["steps"] == 8
    assert row["eval_loss"] == [line["eval/loss"] for line in lines if "eval/loss" in line][-1]
    series = read_sweep(out).series([row["run_id"]], ["train/loss"])
    assert series.column("value").to_pylist() == losses
    assert {"torch", "megasdc"} <= set(json.loads(row["versions"]))
    assert next(one for one in read_sweep(out).rows if one["cell"] == "wild")[LR] == 30.0
    assert not list(out.glob("runs/*/checkpoints/step_*8"))


def test_the_table_needs_no_data(swept: tuple[Path, Path], base: Path) -> None:
    """It is shown where prepared text is damaged; a start is refused there."""
    path, out = swept
    tokens = next(Path(json.loads(base.read_text())["megasdc"]["data"]["path"]).glob("*.bin"))
    tokens.rename(tokens.with_suffix(".away"))
    try:
        done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out), "--table", "--json"])
        assert done.exit_code == 0 and json.loads(done.stdout)["rows"] > 0
        refused = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out)]).exception
        assert isinstance(refused, ConfigError) and "megasdc.data" in str(refused)
    finally:
        tokens.with_suffix(".away").rename(tokens)


def test_another_yardstick_judges_finished_runs_again_without_running_them(swept: tuple[Path, Path]) -> None:
    """With other final steps the table changes, and no run starts."""
    path, out = swept
    before = {row["run_id"]: row["final_loss"] for row in read_sweep(out).rows if row["status"] == "done"}
    starts = starts_of(out)
    raw = json.loads(path.read_text())
    changed = path.with_name("changed.json")
    changed.write_text(json.dumps({**raw, "final_steps": 4}))
    gather(open_sweep(changed, out=out))
    after = {row["run_id"]: row["final_loss"] for row in read_sweep(out).rows}
    assert all(after[run_id] != loss for run_id, loss in before.items())
    gather(open_sweep(path, out=out))
    assert {run_id: loss for run_id, loss in before.items()}.items() <= {
        row["run_id"]: row["final_loss"] for row in read_sweep(out).rows
    }.items()
    assert starts_of(out) == starts


def test_runs_of_several_ranks(tmp_path: Path, base: Path) -> None:
    """Two ranks train as one run; when one of them ends, the other does not wait for it, and the reason is told."""
    broken = {"megasdc.process_faults": [{"kind": "exit", "exit_code": 5, "rank": 1, "steps": [2, 2]}]}
    cells = [{"name": "two"}, {"name": "broken", "set": broken}]
    settings = {"megasdc.training.steps": 4, "megasdc.training.eval_interval": 0}
    path = write_sweep(tmp_path, base, ranks=2, set=settings, cells=cells)
    there: list[int] = []
    out = tmp_path / "out"
    run_sweep(
        open_sweep(path, out=out), 2, progress=False, on_progress=lambda *_: there.append(len(read_sweep(out).rows))
    )
    assert there[0] == 0, "before a run has finished it can be read too"
    rows = {row["cell"]: row for row in read_sweep(out).rows}
    assert (rows["two"]["status"], rows["two"]["steps"]) == ("done", 4)
    assert rows["broken"]["status"] == "failed" and "exit code 5" in rows["broken"]["reason"]


def test_a_folder_takes_one_sweep_at_a_time(swept: tuple[Path, Path]) -> None:
    """A second runner is refused while a first one works."""
    with alone(swept[1]), pytest.raises(StorageError, match="another megasdc sweep"):
        run_sweep(open_sweep(swept[0], out=swept[1]), 1, progress=False)


def test_a_sweep_of_studies_makes_the_tables_of_nodes(tmp_path: Path, base: Path) -> None:
    """A healthy pair parts nowhere; a node is found in the submodules and gradients that it harms, and nowhere else."""
    faults = [
        {"phase": "forward", "submodule": "*.mlp.linear_fc2", "slot": "output", "kind": "scale", "factor": 3.0},
    ]
    mode = "megasdc.study.mode"
    path = write_sweep(
        tmp_path,
        base,
        ranks=2,
        set={
            "megasdc.study.replicas": 2,
            "megasdc.determinism.enabled": True,
            "megasdc.training.steps": 4,
            "megasdc.training.eval_interval": 4,
        },
        cells=[{"name": one, "set": {mode: one}} for one in ("computation_sync", "parameter_sync", "free_run")],
        nodes=[{"name": "n", "faults": [{**faults[0], "elements": 10}]}],
    )
    out = tmp_path / "out"
    table = run_sweep(open_sweep(path, out=out), 1, progress=False)
    assert {row["status"] for row in read_sweep(out).rows} == {"done"}
    nodes = {(one.mode, one.node): one for one in table.nodes}
    assert len(nodes) == 6
    for mode_name in ("computation_sync", "parameter_sync", "free_run"):
        healthy, harmed = nodes[mode_name, "healthy"], nodes[mode_name, "n"]
        assert healthy.largest_loss_difference == 0.0
        assert all(row.mismatches == 0 for row in healthy.mismatches.values())
        assert healthy.noise in (None, 0.0)
        assert healthy.parameters in (None, 0.0)
        assert healthy.disagreement in (None, 0.0)
        if mode_name == "computation_sync":
            wrong = {place: row.mismatches for place, row in harmed.mismatches.items() if row.mismatches}
            results = harmed.mismatches["ffn", "forward"].results
            assert wrong == {("ffn", "forward"): 10 * results}
            assert harmed.mismatches["ffn", "forward"].severity_mean == pytest.approx(2.0)
            assert harmed.wrong_steps == 4
    assert (nodes["parameter_sync", "n"].noise or 0.0) > 0
    assert (nodes["free_run", "n"].parameters or 0.0) > 0
    losses = read_sweep(out).series(names=["train/loss"]).to_pylist()
    trusted = out / "runs" / nodes_run(out, "free_run", "n") / "replica_0" / "metrics.jsonl"
    own = [json.loads(line)["train/loss"] for line in trusted.read_text().splitlines() if "train/loss" in line]
    assert own != [row["value"] for row in losses if row["run_id"] == nodes_run(out, "free_run", "n")]
    tables = node_tables(table.nodes)
    assert [one.name for one in tables] == ["rq1_submodules", "rq2_gradients", "rq3_training"]
    assert all(len(row) == len(one.headings) for one in tables for row in one.rows)


def nodes_run(out: Path, cell: str, node: str) -> str:
    """The run of a place."""
    return next(row["run_id"] for row in read_sweep(out).rows if (row["cell"], row["node"]) == (cell, node))
