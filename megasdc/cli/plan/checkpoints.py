"""`megasdc plan-checkpoints`: how often to save in memory and on the disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from megasdc.common.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megasdc.config.sections import MegasdcSection
    from megasdc.lab.planning.checkpoints.job import Costs
    from megasdc.lab.planning.checkpoints.rates import FailureShares, Preset
    from megasdc.lab.report.run_costs import RunCosts

_HOUR_S = 3600


@dataclass(frozen=True)
class FailureOptions:
    """Options of how often the job fails, and of what."""

    preset: PresetName = option(
        "llama3", "Published failures: their rate, scaled linearly with devices, and their shares by kind."
    )
    hosts: int | None = option(None, "Hosts of the job; default: 128.", min=1)
    devices_per_host: int = option(8, "Devices of a host, to scale a published rate.", min=1)
    failures_per_host_hour: float | None = option(None, "Your own rate instead of a published one.", min=0)
    mtbf_hours: float | None = option(
        None, "Mean time between failures of the whole job, instead of a rate and --hosts.", min=0
    )
    host_share: float | None = option(None, "Share of failures that lose a host; default: published.", min=0, max=1)
    older_share: float | None = option(
        None,
        "Share of failures after which only a verified checkpoint is good, such as corruption; default: published. "
        "The rest ends ranks alone.",
        min=0,
        max=1,
    )


@dataclass(frozen=True)
class CostOptions:
    """Options of what saves and restarts cost."""

    saves: SaveOptions
    restarts: RestartOptions
    verification_steps: int | None = option(
        None, "Steps from a checkpoint to the audit that verifies it, at most; default: 50.", min=0
    )
    detection_s: float | None = option(None, "Seconds from a failure to the begin of the restart; default: 60.", min=0)


@dataclass(frozen=True)
class PlanCheckpointsOptions:
    """Options of ``megasdc plan-checkpoints``."""

    failures: FailureOptions
    costs: CostOptions
    config: Path | None = option(
        None,
        "Configuration whose checkpoint.interval is compared, and whose audits verify.",
        make=input_option,
        reads=ConfigError,
    )
    run: Path | None = option(
        None,
        "Run folder whose measured steps and saves are taken where no option says otherwise, and its configuration.",
        make=input_option,
        reads=DataError,
    )
    trials: int = option(400, "Jobs to simulate at each interval, with 400 failures each; 0: formulas only.", min=0)
    seed: int = option(1, "Seed of all draws.", min=0)


@app.command(
    "plan-checkpoints",
    epilog="Example: megasdc plan-checkpoints --hosts 512 --step-s 6 --memory-stall-s 0.05 --partners "
    "--disk-stall-s 2 --disk-duration-s 90 --figure plan.html",
)
def plan_checkpoints(options: PlanCheckpointsOptions, output: Output) -> None:
    """Find how often to save in memory and on the disk, so that failures and saves cost least time.

    Planning only: by the formulas of Young and of Daly, by the exact minimum for both kinds of save together, and by
    simulation. Each figure is printed with where it comes from: given, measured, published or assumed.
    """
    if options.trials == 1:
        raise typer.BadParameter("--trials: got 1, needed at least 2 for an interval of confidence, or 0")

    from megasdc.common.program import progress_bars
    from megasdc.lab.planning.checkpoints.job import ASSUMED, JobModel
    from megasdc.lab.planning.checkpoints.plan import plan_intervals
    from megasdc.lab.report.checkpoint_plan_page import checkpoint_plan_page

    measured, sections = _read(options)
    origins = FigureOrigins(ASSUMED)
    with refusing_figures():
        shares, mtbf_s = _failures(options.failures, origins)
        job = JobModel(mtbf_s, shares, _costs(options.costs, measured, sections, origins))
    own = None if sections is None else (sections.checkpoint.memory.interval, sections.checkpoint.interval)
    with progress_bars(quiet=output.as_json) as on_progress:
        plan = plan_intervals(job, own, options.trials, options.seed, on_progress)
    notes = () if measured is None else measured.notes
    output.write(with_origins(plan, options.failures.preset, notes, origins), checkpoint_plan_page)


def _read(options: PlanCheckpointsOptions) -> tuple[RunCosts | None, MegasdcSection | None]:
    """What the run measured, and the configuration that is compared."""
    from megasdc.config.load import load_config

    measured = None
    if options.run is not None:
        from megasdc.lab.report.run_costs import load_run_costs

        measured = load_run_costs(options.run)
    if options.config is not None:
        return measured, load_config(options.config).megasdc
    return measured, None if measured is None else measured.sections


def _failures(options: FailureOptions, origins: FigureOrigins) -> tuple[FailureShares, float]:
    """Shares of kinds, and mean seconds between failures of the job."""
    from megasdc.lab.planning.checkpoints.rates import PRESETS, FailureShares

    preset = PRESETS[options.preset]
    published = f"preset {options.preset}"
    shares = FailureShares(
        host=origins.choose("host_share", options.host_share, (preset.shares.host, published)),
        older=origins.choose("older_share", options.older_share, (preset.shares.older, published)),
    )
    if options.mtbf_hours is not None:
        if options.hosts is not None or options.failures_per_host_hour is not None:
            raise ValueError("--mtbf-hours is of the whole job: give it alone, or --hosts and --failures-per-host-hour")
        origins.found["mtbf_s"] = "--mtbf-hours"
        return shares, options.mtbf_hours * _HOUR_S
    hosts = origins.choose("hosts", options.hosts)
    rate = _rate_of_host(options, preset)
    how = published if options.failures_per_host_hour is None else "--failures-per-host-hour"
    origins.found["mtbf_s"] = f"{how}, {hosts:,} hosts ({origins.found.pop('hosts')})"
    return shares, _HOUR_S / (rate * hosts) if rate else math.inf


def _rate_of_host(options: FailureOptions, preset: Preset) -> float:
    if options.failures_per_host_hour is not None:
        return options.failures_per_host_hour
    if preset.per_device_hour is None:
        raise ValueError(
            f"--preset {options.preset} has shares of kinds and no rate: give --failures-per-host-hour or "
            "--mtbf-hours too"
        )
    return preset.per_device_hour * options.devices_per_host


def _costs(
    options: CostOptions, run: RunCosts | None, sections: MegasdcSection | None, origins: FigureOrigins
) -> Costs:
    """Seconds of everything: as given, else as the run measured, else as assumed."""
    from megasdc.lab.planning.checkpoints.job import Costs

    saves = choose_saves(options.saves, run, sections, origins)
    audit = sections.audit if sections is not None and sections.audit.enabled else None
    verified_after = audit and (1 if audit.verify_checkpoints else audit.interval)
    verification = origins.choose("verification_steps", options.verification_steps, (verified_after, "`audit`"))
    origins.found["verification_s"] = f"{verification:,} steps ({origins.found.pop('verification_steps')})"
    restarts = origins.choose_each(options.restarts)
    return Costs(
        **saves,
        verification_s=verification * saves["step_s"],
        detection_s=origins.choose("detection_s", options.detection_s),
        **restarts,
    )
