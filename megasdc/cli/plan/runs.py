"""`megasdc plan-run`: which part of the time of a run on many devices is training, and what would raise it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megasdc.cli.app import Output, app, input_option
from megasdc.cli.options import option
from megasdc.cli.plan.costs import (
    FigureOrigins,
    PresetName,
    RestartOptions,
    SaveOptions,
    choose_saves,
    refusing_figures,
    with_origins,
)
from megasdc.common.errors import DataError

if TYPE_CHECKING:
    from megasdc.config.detection import AuditSection
    from megasdc.lab.planning.checkpoints.formulas import Intervals
    from megasdc.lab.planning.checkpoints.job import Costs
    from megasdc.lab.planning.runs.fleet import Audits, FailureCause, Fleet
    from megasdc.lab.planning.runs.measured import Measured, Pieces, Prediction
    from megasdc.lab.report.run_costs import RunCosts

_CAUSES = "host, network, software, hang, storage, corruption"


@dataclass(frozen=True)
class FleetOptions:
    """Options of how many devices there are, and how they fail."""

    devices: int = option(16_384, "Devices of the run.", min=1)
    devices_per_host: int = option(8, "Devices of a host.", min=1)
    days: float = option(90.0, "Length of the run.", min=0)
    preset: PresetName = option("llama3", "Published failures: their rate of a device, and their shares by cause.")
    rate: tuple[str, ...] = option(
        (),
        f"Your own failures of a device in an hour, of one cause: {_CAUSES}; may be repeated.",
        metavar="CAUSE=RATE",
    )
    replaced: tuple[str, ...] = option(
        (),
        "Share of the failures of a cause after which a host is replaced; default: 1 of host, storage and corruption, "
        "else 0; may be repeated.",
        metavar="CAUSE=SHARE",
    )
    spares: int | None = option(None, "Spare hosts; default: as many as --waiting asks for.", min=0)
    waiting: float = option(0.01, "Chance of a replaced host to find no spare, at most.", min=1e-6, max=0.999)
    repair_hours: float | None = option(
        None,
        "From the failure of a host that is replaced until it, or another, is a spare; default: 24.",
        min=0,
        max=8760,
    )


@dataclass(frozen=True)
class FoundOptions:
    """Options of how failures are found, and what follows."""

    detection: tuple[str, ...] = option(
        (),
        "Seconds from a failure of a cause to the end of its attempt; default: measured, or assumed. May be repeated.",
        metavar="CAUSE=SECONDS",
    )
    audit_steps: int | None = option(
        None, "Steps between audits, which find corruption; 0: none; default: 50, or the run's.", min=0
    )
    audit_coverage: float | None = option(
        None, "Share of corruption that audits see, of what the checks of each step do not; default: 0.9.", min=0, max=1
    )
    step_coverage: float | None = option(
        None, "Share of corruption that the checks of each step see; default: 0.", min=0, max=1
    )
    audit_cost: float | None = option(None, "Time of an audit as a share of a step; default: 0.019.", min=0)
    deciding_s: float | None = option(
        None, "Seconds from the end of an attempt to the plan of the next one; default: measured, else 1.", min=0
    )
    start_per_host_s: float | None = option(
        None, "Seconds that a restart takes longer for each host; default: 0, as long on all hosts as on one.", min=0
    )


@dataclass(frozen=True)
class PlanRunOptions:
    """Options of ``megasdc plan-run``."""

    fleet: FleetOptions
    found: FoundOptions
    saves: SaveOptions
    restarts: RestartOptions
    memory_steps: int | None = option(
        None, "Steps between snapshots in memory; default: those that lose least, with the disk's.", min=1
    )
    disk_steps: int | None = option(
        None, "Steps between checkpoints on the disk, a multiple of --memory-steps; default: likewise.", min=1
    )
    run: tuple[Path, ...] = option(
        (),
        "Folder of a supervised run: its starts, detection, decisions, steps and saves are taken where no option says "
        "otherwise, and its productive time is predicted, from those of the others where it is repeated.",
        make=input_option,
        reads=DataError,
    )
    trials: int = option(100, "Runs to simulate of each fleet.", min=2)
    seed: int = option(1, "Seed of all draws.", min=0)


@app.command(
    "plan-run",
    epilog="Example: megasdc plan-run --devices 100000 --step-s 6 --memory-stall-s 0.05 --partners --disk-stall-s 2 "
    "--disk-duration-s 90 --figure plan.html",
)
def plan_run(options: PlanRunOptions, output: Output) -> None:
    """Predict which part of the time of a supervised run on many devices is training, and what would raise it most.

    Planning only: a simulation of runs that fail, are restarted and go on, with spare hosts, beside a formula. Each
    figure is printed with where it comes from: given, measured, published or assumed.
    """
    if not 0 < options.fleet.days < math.inf:
        raise typer.BadParameter(f"--days: got {options.fleet.days:g}, needed a finite number above 0")

    from megasdc.common.program import progress_bars
    from megasdc.lab.planning.runs.assumed import ASSUMED
    from megasdc.lab.planning.runs.measured import measure_run
    from megasdc.lab.planning.runs.run_plan import make_run_plan
    from megasdc.lab.report.run_costs import load_run_costs
    from megasdc.lab.report.run_plan_page import run_plan_page

    costs = [load_run_costs(path) for path in options.run]
    measured = [measure_run(path, time.time()) for path in options.run]
    origins = FigureOrigins(ASSUMED)
    with refusing_figures():
        predictions, notes = _predictions(measured, costs, options.seed)
        fleet = _fleet(options, measured, costs[0] if costs else None, origins)
        with progress_bars(quiet=output.as_json) as on_progress:
            plan = make_run_plan(
                fleet, options.fleet.days, options.fleet.waiting, options.trials, options.seed, on_progress
            )
    plan = with_origins(plan, options.fleet.preset, notes, origins, predictions=tuple(predictions))
    output.write(plan, run_plan_page)


def _predictions(
    measured: Sequence[Measured], costs: Sequence[RunCosts], seed: int
) -> tuple[list[Prediction], list[str]]:
    """What the model says of each run, and what is missing."""
    from megasdc.lab.planning.runs.measured import pieces_for, predict_run

    found, notes = [], list[str]()
    for run, cost in zip(measured, costs, strict=True):
        notes += cost.notes
        if cost.sections is None:
            notes.append(f"{run.path}: its time is not predicted, since its configuration is not known")
            continue
        pieces, others = pieces_for(run, measured)
        found.append(predict_run(run, pieces, others, cost.sections, seed))
    return found, notes


def _fleet(
    options: PlanRunOptions, measured: Sequence[Measured], costs: RunCosts | None, origins: FigureOrigins
) -> Fleet:
    """The fleet, of figures that were given, measured, published or assumed.

    Raises:
        ValueError: it cannot be.
    """
    from megasdc.lab.planning.runs.fleet import HOUR_S, Fleet, spares_needed
    from megasdc.lab.planning.runs.measured import Pieces

    pieces = Pieces([attempt for run in measured for attempt in run.pieces.attempts])
    sections = None if costs is None else costs.sections
    saves = choose_saves(options.saves, costs, sections, origins)
    hosts = math.ceil(options.fleet.devices / options.fleet.devices_per_host)
    fleet = Fleet(
        devices=options.fleet.devices,
        hosts=hosts,
        causes=_causes(options, pieces, origins),
        costs=_costs(options.restarts, saves, pieces, origins),
        start_per_host_s=origins.choose("start_per_host_s", options.found.start_per_host_s),
        deciding_s=origins.choose(
            "deciding_s", options.found.deciding_s, (pieces.deciding_s, f"mean of {len(pieces.failed)} of the runs")
        ),
        audits=_audits(options.found, None if sections is None else sections.audit, origins),
        spares=0,
        repair_s=origins.choose("repair_hours", options.fleet.repair_hours) * HOUR_S,
        fixed=_intervals(options, saves["memory_stall_s"] is not None, origins),
    )
    fleet.check()
    needed = spares_needed(fleet.replaced_per_s, fleet.repair_s, options.fleet.waiting)
    return replace(
        fleet,
        spares=origins.choose("spares", options.fleet.spares, (needed, f"--waiting {options.fleet.waiting:g}")),
    )


def _causes(options: PlanRunOptions, pieces: Pieces, origins: FigureOrigins) -> tuple[FailureCause, ...]:
    from megasdc.lab.planning.checkpoints.rates import CAUSES, PRESETS
    from megasdc.lab.planning.runs.assumed import DETECTION_S, REPLACED
    from megasdc.lab.planning.runs.fleet import FailureCause

    preset, published = PRESETS[options.fleet.preset], f"preset {options.fleet.preset}"
    rates = _by_cause("--rate", options.fleet.rate)
    detection_s = _by_cause("--detection", options.found.detection)
    replaced = _by_cause("--replaced", options.fleet.replaced)
    total = preset.per_device_hour
    if total is None and rates.keys() < set(CAUSES):
        raise ValueError(
            f"--preset {options.fleet.preset} has shares of causes and no rate: give --rate of each cause, or another "
            "preset"
        )
    found = []
    for name in CAUSES:
        for figure, given in (("rate", rates), ("detection", detection_s), ("replaced", replaced)):
            if name in given:
                origins.found[f"{figure} {name}"] = f"--{figure}"
        origins.found.setdefault(f"rate {name}", published)
        origins.found.setdefault(f"detection {name}", "mean of the runs" if name in pieces.detection_s else "assumed")
        origins.found.setdefault(f"replaced {name}", "assumed")
        found.append(
            FailureCause(
                name=name,
                per_device_hour=rates.get(name, preset.causes[name] * (total or 0.0)),
                detection_s=detection_s.get(name, pieces.detection_s.get(name, DETECTION_S[name])),
                replaced=replaced.get(name, REPLACED[name]),
            )
        )
    return tuple(found)


def _by_cause(name: str, given: Sequence[str]) -> Mapping[str, float]:
    """Numbers by cause of an option that may be repeated."""
    from megasdc.lab.planning.checkpoints.rates import CAUSES

    found = {}
    for text in given:
        cause, _, value = text.partition("=")
        try:
            found[cause] = float(value)
        except ValueError as error:
            raise ValueError(f"{name}: got {text!r}, needed CAUSE=NUMBER, such as host=0.5") from error
        if cause not in CAUSES:
            raise ValueError(f"{name}: got {text!r}, but {cause!r} is none of the causes {', '.join(CAUSES)}")
    return found


def _costs(options: RestartOptions, saves: Mapping[str, Any], pieces: Pieces, origins: FigureOrigins) -> Costs:
    from megasdc.lab.planning.checkpoints.job import Costs

    started = len(pieces.starts)
    of_runs = (pieces.start_s, f"mean of {started} starts of the runs") if started else (None, "")
    restarts = origins.choose_each(options, of_runs)
    return Costs(**saves, **restarts, verification_s=0.0, detection_s=0.0)  # both: see Fleet


def _audits(options: FoundOptions, section: AuditSection | None, origins: FigureOrigins) -> Audits:
    from megasdc.lab.planning.runs.fleet import Audits

    own = None if section is None else section.interval if section.enabled else 0
    return Audits(
        interval=origins.choose("audit_steps", options.audit_steps, (own, "`audit` of the run")),
        coverage=origins.choose("audit_coverage", options.audit_coverage),
        step_coverage=origins.choose("step_coverage", options.step_coverage),
        cost=origins.choose("audit_cost", options.audit_cost),
    )


def _intervals(options: PlanRunOptions, has_memory: bool, origins: FigureOrigins) -> Intervals | None:
    """Steps between saves as given; None: none are."""
    from megasdc.lab.planning.checkpoints.formulas import Intervals

    memory, disk = options.memory_steps, options.disk_steps
    origins.found["intervals"] = "least expected loss" if memory is None and disk is None else "given"
    if memory is not None and not has_memory:
        raise ValueError(f"--memory-steps is {memory}, and there are no snapshots in memory: give --memory-stall-s too")
    if disk is None and memory is None:
        return None
    if disk is None or (memory is None and has_memory):
        raise ValueError("--memory-steps and --disk-steps are chosen together: give both, or neither")
    if memory is not None and disk % memory:
        raise ValueError(f"--disk-steps is {disk}, needed a multiple of --memory-steps, which is {memory}")
    return Intervals(memory, disk)
