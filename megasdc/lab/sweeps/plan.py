"""Plan of a sweep: each cell, node and seed as a complete, checked configuration; equal ones share a run."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout, faulty_replica, replica_folder
from megasdc.config.faults import expand_faults
from megasdc.config.load import RunConfig, parse_config
from megasdc.config.read import read_json
from megasdc.config.sections import StudySection
from megasdc.data.manifest import digest_settings
from megasdc.lab.sweeps.papers.tables import PAPER_TABLES, missing_row
from megasdc.lab.sweeps.sweep_file import HEALTHY, CellSpec, NodeSpec, Overrides, SweepFile

SEED_STRIDE = 1_000_003
"""Seed of a fault: the node's seed times this, plus the fault's own seed, plus the run's seed."""
_HEALTHY_NODE = NodeSpec.model_validate({"name": HEALTHY})
_OWN_PLACES = ("run_dir", "progress_bar")
_WITHOUT_EFFECT = ("health",)
"""Sections that change no result: runs that differ in them alone are one run, as are those from before they existed."""
_FREE = ("hidden_dropout", "attention_dropout", "init_std", "vocab_multiple", "backend", "fuse", "initial_weights")
"""Fields of the model that do not define what its weights mean."""


@dataclass(frozen=True)
class StartCheckpoint:
    """The checkpoint from which a run starts; ``weights``: with its weights alone, at step 0."""

    run_id: str
    step: int
    weights: bool = False

    @property
    def steps_done(self) -> int:
        """The step after which the run goes on."""
        return 0 if self.weights else self.step


@dataclass(frozen=True)
class PlannedRun:
    """One run; its id, a digest of configuration, start and number of ranks, names its folder.

    ``label``: the first cell, node and seed that need it; ``config``: resolved, but ``logging.run_dir`` is set when the
    run starts; ``start``: None: from scratch; ``donor``: whether others start from its checkpoint; ``condition``: id of
    the healthy run from the same checkpoint, which must have been stable for this one to be run, None: none.
    """

    run_id: str
    label: str
    config: dict[str, Any] = field(repr=False)
    ranks: int
    start: StartCheckpoint | None
    last_step: int
    healthy: bool
    donor: bool
    condition: str | None = None

    @property
    def awaited(self) -> tuple[str, ...]:
        """Ids of the runs that must be finished before this one begins."""
        starts = None if self.start is None else self.start.run_id
        return tuple(one for one in (starts, self.condition) if one is not None)


@dataclass(frozen=True)
class ResultRow:
    """One row of the results: a cell, node and seed, and the run that provides it."""

    cell: str
    node: str
    profile: str | None
    control: bool
    made_up: bool
    seed: int
    start: str
    settings: Overrides
    run_id: str


@dataclass(frozen=True)
class SweepPlan:
    """Plan of a sweep.

    Args:
        sweep: with its size applied.
        cells: with the grid expanded.
        varied: dotted paths of the settings that cells set.
        runs: by id; each after the one from which it starts, healthy ones before the others.
        places: one for each cell, node and seed; several may share a run.
    """

    sweep: SweepFile
    cells: tuple[CellSpec, ...]
    varied: tuple[str, ...]
    runs: dict[str, PlannedRun]
    places: tuple[ResultRow, ...]


def build_plan(sweep: SweepFile) -> SweepPlan:
    """Expands a sweep, with its size applied, and checks every run's configuration.

    Raises:
        ConfigError: with every problem of every cell, each once.
    """
    cells = tuple(multiply_out(sweep))
    problems = _file_problems(sweep, cells)
    if problems:
        raise ConfigError(problems, sweep.name)
    builder = _Builder(sweep, {cell.name: cell for cell in cells})
    places = []
    for cell in cells:
        for seed, node in itertools.product(_seeds(sweep, cell), (None, *sweep.nodes)):
            if (run := builder.add(cell, node, seed)) is not None:
                places.append(_place(cell, node, seed, run))
    if builder.problems:
        raise ConfigError(list(dict.fromkeys(builder.problems)), sweep.name)
    varied = tuple(dict.fromkeys(path for cell in cells for path in cell.set))
    return SweepPlan(sweep, cells, varied, _in_order(builder.runs), tuple(places))


def multiply_out(sweep: SweepFile) -> Iterator[CellSpec]:
    """The cells, each with every combination of the grid; names contain the grid's values."""
    cells = sweep.cells or [CellSpec.model_validate({"name": "all"})]
    if not sweep.grid:
        yield from cells
        return
    for cell, values in itertools.product(cells, itertools.product(*sweep.grid.values())):
        chosen = dict(zip(sweep.grid, values, strict=True))
        text = ", ".join(f"{path.rpartition('.')[2]} {json.dumps(value)}" for path, value in chosen.items())
        name = f"{cell.name}, {text}" if sweep.cells else text
        yield cell.model_copy(update={"name": name, "set": {**cell.set, **chosen}})


def runs_of(plan: SweepPlan, only: Sequence[str]) -> dict[str, PlannedRun]:
    """The runs of the named cells, all where there are none, including those from which they start.

    Raises:
        ConfigError: there is no such cell.
    """
    names = [cell.name for cell in plan.cells]
    if unknown := [name for name in only if name not in names]:
        raise ConfigError([f"--only: there is no cell {name!r}; there are {', '.join(names)}." for name in unknown])
    wanted = {place.run_id for place in plan.places if not only or place.cell in only}
    for _ in range(2):  # a run on a node awaits a healthy one, which awaits the one that saved its checkpoint
        wanted |= {awaited for run_id in wanted for awaited in plan.runs[run_id].awaited}
    return {run_id: run for run_id, run in plan.runs.items() if run_id in wanted}


def _file_problems(sweep: SweepFile, cells: Sequence[CellSpec]) -> list[str]:
    """Problems of the file: names that are unknown or not unique, missing values."""
    names = [cell.name for cell in cells]
    known = f"there are {', '.join(names)}"
    nodes = [HEALTHY, *(node.name for node in sweep.nodes)]
    problems = [f"cells: {name!r} stands there twice; give each a name of its own." for name in _doubles(names)]
    problems += [f"nodes: {name!r} is taken; give each a name of its own." for name in _doubles(nodes)]
    problems += [f"grid.{path}: no values; give at least one." for path, values in sweep.grid.items() if not values]
    problems += [
        f"nodes.{index}: neither profile nor faults; give one of them."
        for index, node in enumerate(sweep.nodes)
        if node.profile is None and not node.faults
    ]
    asked = [("decisive.cells", name) for name in sweep.decisive.cells]
    asked += [(f"cells.{cell.name}.start.cell", cell.start.cell) for cell in cells if cell.start and cell.start.cell]
    problems += [f"{where}: there is no cell {name!r}; {known}." for where, name in asked if name not in names]
    problems += [
        f"tables: {name!r} is not stored; there are {', '.join(PAPER_TABLES)}."
        for name in sweep.tables
        if name not in PAPER_TABLES
    ]
    for cell in cells:
        if cell.paper is not None and (why := missing_row(cell.paper)):
            problems.append(f"cells.{cell.name}.paper: {why}.")
    if sweep.decisive.cells and not sweep.decisive.seeds:
        problems.append("decisive.seeds: no seeds for the decisive cells; give some.")
    return problems


def _doubles(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _seeds(sweep: SweepFile, cell: CellSpec) -> list[int]:
    return sweep.decisive.seeds if cell.name in sweep.decisive.cells else sweep.seeds


def _place(cell: CellSpec, node: NodeSpec | None, seed: int, run: PlannedRun) -> ResultRow:
    start = "scratch"
    if cell.start is not None:
        start = f"step {cell.start.step} of {cell.start.cell or cell.name}"
        start = f"weights of {start}" if cell.start.weights else start
        start += " on the node" if cell.start.of == "node" else ""
    node = node or _HEALTHY_NODE
    named = (node.name, node.profile, node.control, node.made_up)
    return ResultRow(cell.name, *named, seed, start, cell.set, run.run_id)


def _in_order(runs: dict[str, PlannedRun]) -> dict[str, PlannedRun]:
    """Runs from which others start first, then those without a condition, healthy ones first."""
    ordered = sorted(runs.values(), key=lambda run: (not run.donor, run.condition is not None, not run.healthy))
    return {run.run_id: run for run in ordered}


class _Builder:
    """Builds and checks configurations; equal ones become one run."""

    def __init__(self, sweep: SweepFile, cells: dict[str, CellSpec]) -> None:
        self._sweep = sweep
        self._cells = cells
        self._base, self.problems = read_json(sweep.base)
        self.runs: dict[str, PlannedRun] = {}
        self._bad: set[tuple[str, str]] = set()

    def add(self, cell: CellSpec, node: NodeSpec | None, seed: int) -> PlannedRun | None:
        """The run of a cell, node and seed; None where its configuration is wrong."""
        if cell.start is None:
            return self._run(cell, node, seed, None, stop=None)
        of_node = cell.start.of == "node"
        saver = self._cells[cell.start.cell or cell.name]
        donor = self._run(saver, node if of_node else None, seed, None, stop=cell.start.step)
        if donor is None:
            return None
        start = StartCheckpoint(donor.run_id, cell.start.step, cell.start.weights)
        machine = None if of_node else node
        run = self._run(cell, machine, seed, start, stop=None)
        if machine is not None and run is not None and (healthy := self._run(cell, None, seed, start, stop=None)):
            run = self.runs[run.run_id] = replace(run, condition=healthy.run_id)
        if run is not None and (problems := _start_problems(donor, run.config, start)):
            self._refuse(cell.name, f"cells.{cell.name}.start", problems)
        return run

    def _run(
        self, cell: CellSpec, node: NodeSpec | None, seed: int, start: StartCheckpoint | None, stop: int | None
    ) -> PlannedRun | None:
        where = f"cells.{cell.name}, {HEALTHY if node is None else node.name}"
        said = {**self._sweep.set, **cell.set, "megasdc.training.seed": seed}
        texts = [f"{path}={json.dumps(value)}" for path, value in said.items()]
        raw = copy.deepcopy(self._base)
        own = raw.setdefault("megasdc", {})
        own.setdefault("logging", {})["run_dir"] = "?"
        own["faults"] = own.get("faults", [])
        own.setdefault("protect", "off")  # checks would only cost
        source = f"{self._sweep.base} with what the sweep sets"
        try:
            config = parse_config(raw, texts, source)
            if stop is not None and stop != _last_step(config):  # else it is the same run as without
                texts.append(f"megasdc.training.stop_step={stop}")
            own["faults"] += faults_of(node, seed, config.megasdc.study)
            config = parse_config(raw, texts, source)
            check_layout(config, self._sweep.ranks)
            problems = _run_problems(self._sweep, config, node, start)
        except ConfigError as error:
            problems = error.problems
        if problems:
            self._refuse(cell.name, where, problems)
            return None
        label = f"{where}, seed {seed}" + (f", to step {stop}" if stop else "")
        if start is not None and not self.runs[start.run_id].healthy:
            label += f", from {self.runs[start.run_id].label}"
        return self._add(config, label, start, donor=stop is not None)

    def _refuse(self, cell: str, where: str, problems: Sequence[str]) -> None:
        """Stores problems; one that several nodes of a cell have is reported once."""
        for problem in problems:
            if (cell, problem) not in self._bad:
                self._bad.add((cell, problem))
                self.problems.append(f"{where}: {problem}")

    def _add(self, config: RunConfig, label: str, start: StartCheckpoint | None, *, donor: bool) -> PlannedRun:
        resolved = config.resolved()
        resolved["megasdc"]["faults"] = [spec.model_dump(mode="json") for spec in expand_faults(config.megasdc.faults)]
        sections = {name: value for name, value in resolved["megasdc"].items() if name not in _WITHOUT_EFFECT}
        sections["logging"] = {**sections["logging"], **dict.fromkeys(_OWN_PLACES)}
        content = {**resolved, "megasdc": sections}
        begins = None if start is None else [start.run_id, start.step, *(["weights"] if start.weights else [])]
        run_id = digest_settings({"config": content, "start": begins, "ranks": self._sweep.ranks})
        healthy = not config.megasdc.faults
        run = PlannedRun(run_id, label, resolved, self._sweep.ranks, start, _last_step(config), healthy, donor)
        known = self.runs.setdefault(run_id, run)
        if donor and not known.donor:
            known = self.runs[run_id] = replace(known, donor=True)
        return known


def _last_step(config: RunConfig) -> int:
    training = config.megasdc.training
    return min(training.steps, training.stop_step or training.steps)


def faults_of(node: NodeSpec | None, seed: int, study: StudySection) -> list[dict[str, Any]]:
    """Entries of ``faults`` that simulate a node, None: none, in a run with this seed.

    In one of the replicas of ``study`` the node is unhealthy.
    """
    if node is None:
        return []
    profile = [] if node.profile is None else [{"profile": node.profile, "seed": 0}]
    specs = profile + [spec.model_dump(mode="json") for spec in node.faults]
    place = {} if study.mode is None else {"replica": faulty_replica(study)}
    return [{**spec, "seed": node.seed * SEED_STRIDE + spec["seed"] + seed, **place} for spec in specs]


def measured_folder(run: PlannedRun, folder: Path) -> Path:
    """Folder of a run's losses; in a study, that of the unhealthy replica."""
    study = StudySection.model_validate(run.config["megasdc"]["study"])
    return folder if study.mode is None else replica_folder(folder, faulty_replica(study))


def _run_problems(
    sweep: SweepFile, config: RunConfig, node: NodeSpec | None, start: StartCheckpoint | None
) -> list[str]:
    """Problems of a configuration that is valid by itself but not in a sweep."""
    sections, problems = config.megasdc, []
    if node is None and sections.faults:
        problems.append("megasdc.faults: the base has faults, so no run is healthy; faults come from nodes.")
    if sections.study.mode is not None and sections.study.replicas != 2:
        problems.append(
            f"megasdc.study.replicas: {sections.study.replicas}; a sweep injects faults into one and trusts one: 2."
        )
    if sections.study.mode is not None and start is not None:
        problems.append("start: a study of a sweep begins from scratch; remove it.")
    if sections.checkpoint.folder is not None:
        problems.append("megasdc.checkpoint.folder: each run has a folder of its own; remove it.")
    if sweep.final_steps % sections.logging.interval:
        problems.append(
            f"megasdc.logging.interval: {sections.logging.interval} does not divide final_steps {sweep.final_steps}."
        )
    done = 0 if start is None else start.steps_done
    least = done + sweep.final_steps
    if sections.training.stop_step is None and sections.training.steps < least:
        problems.append(f"megasdc.training.steps: {sections.training.steps}; start and final_steps need {least}.")
    if done >= sections.training.steps:
        problems.append(f"start.step: {done} is not before the last step {sections.training.steps}.")
    return problems


def _start_problems(donor: PlannedRun, config: dict[str, Any], start: StartCheckpoint) -> list[str]:
    """Reasons why a cell cannot start from a run's checkpoint: no such step, or settings of it that would hold."""
    if donor.last_step < start.step:
        return [f"step {start.step} is after {donor.last_step}, the last one of the run that saves it."]
    differing = _other_model(donor.config, config) if start.weights else _other_settings(donor.config, config)
    return [f"the checkpoint's {name} is not the cell's, and would hold; make them equal." for name in differing]


def _other_model(donor: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Fields in which models differ so that the weights of one mean nothing in the other."""
    before, now = donor["megasdc"]["model"], config["megasdc"]["model"]
    return [f"megasdc.model.{key}" for key in now if key not in _FREE and now[key] != before.get(key)]


def _other_settings(donor: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Settings that a whole checkpoint restores and in which two configurations differ."""
    places = ("model", "data", "parallel")
    differing = [f"megasdc.{name}" for name in places if donor["megasdc"][name] != config["megasdc"][name]]
    before, now = (
        {key: value for key, value in one["optimizer"]["params"].items() if key != "lr"} for one in (donor, config)
    )
    differing += [f"optimizer.params.{key}" for key in now if now[key] != before.get(key)]
    if donor["optimizer"]["type"] != config["optimizer"]["type"]:
        differing.append("optimizer.type")
    return differing
