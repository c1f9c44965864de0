"""A wrong sweep is refused as a whole before anything is written; a right one becomes the runs that it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import ConfigError
from megasdc.config.faults import load_profile
from megasdc.lab.sweeps.plan import StartCheckpoint, SweepPlan, build_plan, measured_folder, runs_of
from megasdc.lab.sweeps.results import SWEEP_FILE, ResultStore
from megasdc.lab.sweeps.sweep import _check_folder
from megasdc.lab.sweeps.sweep_file import HEALTHY, load_sweep

CONFIGS = Path(__file__).parents[4] / "configs"
LR = "optimizer.params.lr"


def write(folder: Path, **fields: Any) -> Path:
    """A sweep file over the smoke configuration."""
    raw = {"name": "study", "base": str(CONFIGS / "smoke.json"), "ranks": 2, **fields}
    path = folder / "sweep.json"
    path.write_text(json.dumps(raw))
    return path


def test_unknown_keys_are_refused_with_the_nearest_name_all_at_once(tmp_path: Path) -> None:
    """Misspelt keys in the file, a cell, and a size are each named with what was probably meant."""
    path = write(tmp_path, seed=[1], cells=[{"name": "a", "sett": {}}], sizes={"cpu": {"node": []}})
    with pytest.raises(ConfigError) as caught:
        load_sweep(path, None)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "did you mean seeds?" in text and "did you mean cells.0.set?" in text
    assert "did you mean sizes.cpu.nodes?" in text


def test_a_bad_grid_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell's configuration is checked as a whole: all problems are told, with code 70 and no folder."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, grid={LR: [1e-3, "fast"], "megasdc.model.hidden_size": [128, 130]}, out="x")
    raw = json.loads(path.read_text())
    del raw["out"]
    path.write_text(json.dumps(raw))
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 70
    text = str(done.exception)
    assert "optimizer.params.lr" in text and '"fast"' in text and "hidden_size" in text
    assert sorted(one.name for one in tmp_path.iterdir()) == ["sweep.json"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grid": {LR: []}}, "grid.optimizer.params.lr: no values"),
        ({"nodes": [{"name": "n", "profile": "node_99"}]}, "node_99"),
        ({"nodes": [{"name": "n"}]}, "neither profile nor faults"),
        ({"nodes": [{"name": HEALTHY, "profile": "node_1"}]}, "'healthy' is taken"),
        ({"cells": [{"name": "a", "start": {"cell": "b", "step": 5}}]}, "there is no cell 'b'"),
        ({"cells": [{"name": "a", "start": {"step": 400}}]}, "is not before the last step 400"),
        ({"decisive": {"cells": ["z"], "seeds": [1]}}, "there is no cell 'z'"),
        ({"set": {"megasdc.checkpoint.folder": "x"}}, "megasdc.checkpoint.folder"),
        ({"ranks": 5}, "train_batch_size"),
        ({"cells": [{"name": "a", "paper": "pei_table_1/none such"}]}, "none such"),
        (
            {
                "cells": [
                    {"name": "a"},
                    {"name": "b", "set": {"optimizer.params.betas": [0.9, 0.5]}, "start": {"cell": "a", "step": 9}},
                ]
            },
            "optimizer.params.betas",
        ),
        (
            {
                "cells": [
                    {"name": "a"},
                    {
                        "name": "b",
                        "set": {"megasdc.model.norm_epsilon": 1e-6, "megasdc.model.hidden_dropout": 0.1},
                        "start": {"cell": "a", "step": 9, "weights": True},
                    },
                ]
            },
            "cells.b.start: the checkpoint's megasdc.model.norm_epsilon is not the cell's",
        ),
        (
            {"cells": [{"name": "a"}, {"name": "b", "start": {"cell": "a", "step": 401, "weights": True}}]},
            "step 401 is after 400, the last one",
        ),
        ({"cells": [{"name": "a", "start": {"step": 3, "of": "nodes"}}]}, "input should be 'healthy' or 'node'"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    """Each contradiction is found before a run starts, and named."""
    with pytest.raises(ConfigError) as caught:
        build_plan(load_sweep(write(tmp_path, **fields), None))
    assert said in str(caught.value)


def test_equal_runs_are_one_run(tmp_path: Path) -> None:
    """Cells that are equal share all runs, other settings and other seeds do not; a node's draws differ by seed."""
    node = {"name": "n", "profile": "node_1", "seed": 2}
    cells = [{"name": "a", "set": {LR: 2e-3}}, {"name": "same"}, {"name": "b", "set": {LR: 1e-3}}]
    plan = build_plan(load_sweep(write(tmp_path, cells=cells, nodes=[node], seeds=[1, 2]), None))
    ids = {(place.cell, place.node, place.seed): place.run_id for place in plan.places}
    assert len(ids) == 12 and len(plan.runs) == 8
    assert ids["a", HEALTHY, 1] == ids["same", HEALTHY, 1] != ids["b", HEALTHY, 1]
    assert ids["a", "n", 1] == ids["same", "n", 1] != ids["a", "n", 2]
    seeds = [plan.runs[ids["a", "n", seed]].config["megasdc"]["faults"][0]["seed"] for seed in (1, 2)]
    assert seeds == [2 * 1_000_003 + 1, 2 * 1_000_003 + 2]


def test_a_node_is_what_its_file_said_when_the_sweep_was_planned(tmp_path: Path) -> None:
    """A changed profile makes other runs; each run's own file holds the faults, and the results what was published."""
    profile = tmp_path / "node.json"

    def plan_with(probability: float) -> SweepPlan:
        content = load_profile("node_11").model_dump(mode="json")
        content["faults"][0]["element_probability"] = probability
        profile.write_text(json.dumps(content))
        return build_plan(load_sweep(write(tmp_path, nodes=[{"name": "n", "profile": str(profile)}]), None))

    first, again, other = plan_with(0.5), plan_with(0.5), plan_with(0.25)
    assert first.places == again.places
    healthy, harmed = (
        [place.run_id for plan in (first, other) for place in plan.places if place.node == node]
        for node in (HEALTHY, "n")
    )
    assert healthy[0] == healthy[1] and harmed[0] != harmed[1]
    faults = first.runs[harmed[0]].config["megasdc"]["faults"]
    assert [spec["profile"] for spec in faults] == [None] * 4 and faults[0]["element_probability"] == 0.5
    ResultStore(tmp_path, other).write_plan(None)
    profile.unlink()
    said = json.loads((tmp_path / SWEEP_FILE).read_text())
    assert said["profiles"][str(profile)]["published"] == load_profile("node_11").published


def test_runs_that_start_from_a_checkpoint_come_after_the_one_that_saves_it(tmp_path: Path) -> None:
    """The healthy run of the named cell, stopped at the step, comes first and is shared by all nodes."""
    cells = [{"name": "a", "start": {"cell": "b", "step": 30}}, {"name": "b", "set": {LR: 1e-3}}]
    plan = build_plan(load_sweep(write(tmp_path, cells=cells, nodes=[{"name": "n", "profile": "node_1"}]), None))
    first = next(iter(plan.runs.values()))
    assert first.donor and first.healthy and first.last_step == 30
    assert first.config["optimizer"]["params"]["lr"] == 1e-3
    starts = {place.node: plan.runs[place.run_id].start for place in plan.places if place.cell == "a"}
    assert {start.run_id for start in starts.values() if start} == {first.run_id} and len(starts) == 2
    of_node = {place.node: plan.runs[place.run_id] for place in plan.places if place.cell == "a"}
    assert of_node["n"].condition == of_node[HEALTHY].run_id and of_node[HEALTHY].condition is None
    order = list(plan.runs)
    assert order.index(of_node["n"].run_id) > order.index(of_node[HEALTHY].run_id) > 0
    assert runs_of(plan, ["a"]).keys() == {first.run_id, *(run.run_id for run in of_node.values())}


def test_cells_that_go_on_from_weights_of_the_healthy_run_or_of_each_nodes_own(tmp_path: Path) -> None:
    """A cell's own whole run saves them, once; of a node's, a healthy machine goes on, from step 0 with other data."""
    other = {"megasdc.training.steps": 60, "megasdc.data.path": "elsewhere", LR: 1e-4, "megasdc.training.seed": 1}
    start = {"cell": "before", "step": 200, "weights": True}
    cells = [
        {"name": "before", "set": {"megasdc.training.steps": 200}},
        {"name": "on the node", "set": other, "start": start},
        {"name": "healed", "set": other, "start": {**start, "of": "node"}},
    ]
    path = write(tmp_path, cells=cells, nodes=[{"name": "n", "profile": "node_1"}])
    plan = build_plan(load_sweep(path, None))
    runs = {(place.cell, place.node): plan.runs[place.run_id] for place in plan.places}
    assert len(plan.runs) == 5 and runs["on the node", HEALTHY] == runs["healed", HEALTHY]
    first, second = runs["before", HEALTHY], runs["before", "n"]
    assert list(plan.runs)[:2] == [first.run_id, second.run_id] and first.donor and second.donor
    assert [runs[cell, "n"].start for cell in ("on the node", "healed")] == [
        StartCheckpoint(first.run_id, 200, weights=True),
        StartCheckpoint(second.run_id, 200, weights=True),
    ]
    assert [runs[cell, "n"].condition for cell in ("on the node", "healed")] == [runs["healed", HEALTHY].run_id, None]
    assert [runs[cell, "n"].healthy for cell in ("on the node", "healed")] == [False, True]
    assert runs["healed", "n"].last_step == 60 and runs["healed", "n"].label.endswith("from cells.before, n, seed 1234")
    assert runs_of(plan, ["healed"]).keys() == {
        first.run_id,
        second.run_id,
        *(runs["healed", n].run_id for n in ("n", HEALTHY)),
    }
    places = {(place.cell, place.node): place.start for place in plan.places}
    assert places["healed", "n"] == "weights of step 200 of before on the node"


def test_some_cells_alone_are_run_with_what_they_start_from(tmp_path: Path) -> None:
    """--only takes a cell's runs and their donor, and refuses a name that is none."""
    cells = [{"name": "a", "start": {"cell": "b", "step": 30}}, {"name": "b", "set": {LR: 1e-3}}]
    plan = build_plan(load_sweep(write(tmp_path, cells=cells), None))
    chosen = runs_of(plan, ["a"])
    assert [run.label for run in chosen.values()] == [
        "cells.b, healthy, seed 1234, to step 30",
        "cells.a, healthy, seed 1234",
    ]
    assert runs_of(plan, []) == plan.runs
    with pytest.raises(ConfigError, match="there is no cell 'c'"):
        runs_of(plan, ["c"])


def test_decisive_cells_have_their_own_seeds_and_a_size_takes_the_place(tmp_path: Path) -> None:
    """A size replaces what it names and lays its settings over; a decisive cell is run with more seeds."""
    sizes = {"big": {"set": {LR: 5e-3}, "seeds": [7], "decisive": {"cells": ["b"], "seeds": [7, 8]}}}
    path = write(
        tmp_path, set={LR: 1e-3, "megasdc.training.steps": 100}, cells=[{"name": "a"}, {"name": "b"}], sizes=sizes
    )
    plan = build_plan(load_sweep(path, "big"))
    assert sorted((place.cell, place.seed) for place in plan.places) == [("a", 7), ("b", 7), ("b", 8)]
    config = next(iter(plan.runs.values())).config
    assert (config["optimizer"]["params"]["lr"], config["megasdc"]["training"]["steps"]) == (5e-3, 100)
    with pytest.raises(ConfigError, match="there is no 'huge'"):
        load_sweep(path, "huge")


def test_health_makes_no_other_run(tmp_path: Path) -> None:
    """What changes no result is no part of a run's id, so that finished runs are found again."""
    cells = [{"name": "plain"}, {"name": "watched", "set": {"megasdc.health.enabled": True}}]
    cells.append({"name": "other", "set": {LR: 3e-3}})
    plan = build_plan(load_sweep(write(tmp_path, cells=cells), None))
    assert [
        len({place.run_id for place in plan.places if place.cell in two})
        for two in (("plain", "watched"), ("plain", "other"))
    ] == [1, 2]


def test_cells_and_nodes_of_a_size_take_over_what_the_sweep_says_of_them(tmp_path: Path) -> None:
    """By name, in the size's order; settings are merged, other fields given anew replace, unknown names stand alone."""
    cells = [
        {"name": "a", "set": {LR: 1e-3, "gradient_clipping": 2.0}},
        {"name": "b", "set": {LR: 2e-3}, "start": {"step": 5}},
    ]
    nodes = [{"name": "n", "profile": "node_11", "seed": 4, "made_up": True}, {"name": "m", "profile": "node_1"}]
    small = {
        "cells": [{"name": "b"}, {"name": "a", "set": {LR: 9e-3}}, {"name": "c", "set": {}}],
        "nodes": [{"name": "n", "profile": "node_10"}],
    }
    sweep = load_sweep(write(tmp_path, cells=cells, nodes=nodes, sizes={"small": small, "all": {}}), "small")
    assert [cell.name for cell in sweep.cells] == ["b", "a", "c"]
    assert sweep.cells[0].start is not None and sweep.cells[0].set == {LR: 2e-3}
    assert sweep.cells[1].set == {LR: 9e-3, "gradient_clipping": 2.0} and sweep.cells[2].set == {}
    (node,) = sweep.nodes
    assert (node.profile, node.seed, node.made_up) == ("node_10", 4, True)
    assert len(load_sweep(tmp_path / "sweep.json", "all").nodes) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["pei_table_1", "pei_tables_2_3", "pei_model_size", "pei_skip_nan", "ma_nodes", "ma_finetune"]
)
def test_shipped_sweeps_are_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size of a shipped sweep is right, has a healthy run in every cell, and makes every row of its tables."""
    from megasdc.lab.sweeps.papers.tables import PAPER_TABLES

    monkeypatch.chdir(CONFIGS.parent)
    path = CONFIGS / "sweeps" / f"{name}.json"
    for size in json.loads(path.read_text())["sizes"]:
        plan = build_plan(load_sweep(path, size))
        assert {place.cell for place in plan.places if place.node == HEALTHY} == {cell.name for cell in plan.cells}
        rows = {cell.paper for cell in plan.cells if cell.paper}
        assert size == "cpu_2x2" or rows == {
            f"{table}/{row}" for table in plan.sweep.tables for row in PAPER_TABLES[table].rows
        }
    assert "/work" not in path.read_text() and "/tmp" not in path.read_text()


def test_a_study_harms_one_replica_and_measures_it(tmp_path: Path) -> None:
    """In a study a node's faults are those of the replica that is not trusted, whose losses are the run's."""
    study = {f"megasdc.study.{name}": value for name, value in {"mode": "parameter_sync", "replicas": 2}.items()}
    nodes = [{"name": "n", "profile": "node_11", "seed": 1, "faults": [{"phase": "forward"}]}]
    settings = {**study, "megasdc.determinism.enabled": True, "megasdc.training.steps": 100, "train_batch_size": 8}
    plan = build_plan(load_sweep(write(tmp_path, ranks=2, set=settings, nodes=nodes), None))
    harmed = next(run for run in plan.runs.values() if not run.healthy)
    assert [spec["replica"] for spec in harmed.config["megasdc"]["faults"]] == [1] * 5
    assert measured_folder(harmed, tmp_path) == tmp_path / "replica_1"
    other = {**settings, "megasdc.study.trusted": 1}
    plan = build_plan(load_sweep(write(tmp_path, ranks=2, set=other, nodes=nodes), None))
    assert {measured_folder(run, tmp_path).name for run in plan.runs.values()} == {"replica_0"}
    with pytest.raises(ConfigError, match=r"study\.replicas: 4; a sweep injects faults into one "):
        build_plan(load_sweep(write(tmp_path, ranks=4, set={**settings, "megasdc.study.replicas": 4}), None))
    start = [{"name": "a", "start": {"step": 3}}]
    with pytest.raises(ConfigError, match="a study of a sweep begins from scratch"):
        build_plan(load_sweep(write(tmp_path, ranks=2, set=settings, cells=start), None))


@pytest.mark.parametrize("path", sorted((CONFIGS / "sweeps" / "nodes").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_nodes_say_what_is_assumed(path: Path) -> None:
    """Each simulated node is a profile that says what is published and what was chosen."""
    profile = load_profile(str(path))
    assert profile.faults and profile.assumed and profile.source
    assert profile.published or profile.source.startswith("none")


@pytest.mark.parametrize("content", ["{", "{}", '{"sweep": 1, "size": null}'])
def test_a_damaged_file_of_a_sweep_is_written_anew(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is taken, with a warning; runs are known by their own files."""
    (tmp_path / SWEEP_FILE).write_text(content)
    _check_folder(tmp_path, load_sweep(write(tmp_path), None), None)
    assert "is damaged and is written anew" in caplog.text
