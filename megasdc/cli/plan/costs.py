"""What planning commands share: options of steps, saves and restarts, and where each figure comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer

from megasdc.cli.options import name_of, option

if TYPE_CHECKING:
    from megasdc.config.sections import MegasdcSection
    from megasdc.lab.planning.checkpoints.plan import CheckpointPlan
    from megasdc.lab.planning.runs.run_plan import RunPlan
    from megasdc.lab.report.run_costs import RunCosts

    Plan = TypeVar("Plan", CheckpointPlan, RunPlan)

PresetName = Literal["llama3", "opt-175b", "rsc-1", "byterobust"]
"""Published failures that are known, see ``megasdc.lab.planning.checkpoints.rates``."""


@dataclass(frozen=True)
class SaveOptions:
    """Options of what steps and saves cost."""

    step_s: float | None = option(None, "Seconds of a step; default: 10.", min=0)
    memory_stall_s: float | None = option(
        None, "Seconds that training stands still for a snapshot in host memory; default: none are made.", min=0
    )
    partners: bool = option(False, "Each snapshot in memory is copied to another host.", "--partners")
    disk_stall_s: float | None = option(
        None, "Seconds that training stands still for a checkpoint on the disk; default: 10.", min=0
    )
    disk_duration_s: float | None = option(
        None,
        "Seconds until a checkpoint is whole on the disk, if written in the background; default: --disk-stall-s.",
        min=0,
    )


@dataclass(frozen=True)
class RestartOptions:
    """Options of what restarts cost."""

    restart_memory_s: float | None = option(
        None, "Seconds of a restart from host memory, to its first step; default: 60.", min=0
    )
    restart_partner_s: float | None = option(None, "Seconds of a restart from a partner's memory; default: 90.", min=0)
    restart_disk_s: float | None = option(None, "Seconds of a restart from the disk; default: 300.", min=0)


@dataclass
class FigureOrigins:
    """Where each figure comes from, as it is chosen.

    Args:
        assumed: values by name, of what is neither given, measured nor published.
    """

    assumed: Mapping[str, float]
    found: dict[str, str] = field(default_factory=dict)

    def choose(self, name: str, given: Any, *others: tuple[Any, str]) -> Any:
        """The value that was given, else the first other one that is not None, else the assumed one."""
        for value, origin in ((given, name_of(name)), *others, (self.assumed.get(name), "assumed")):
            if value is not None:
                self.found[name] = origin
                return value
        return None

    def choose_each(self, options: RestartOptions, *others: tuple[Any, str]) -> dict[str, Any]:
        """The values of all options, see ``choose``."""
        return {name: self.choose(name, given, *others) for name, given in vars(options).items()}


@contextlib.contextmanager
def refusing_figures() -> Iterator[None]:
    """Refuse figures of which no plan can be made as wrong options."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def with_origins(plan: Plan, preset: str, notes: Sequence[str], origins: FigureOrigins, **fields: Any) -> Plan:
    """A plan with where its figures come from, and with notes before its own."""
    published = published_rates(preset, origins)
    return replace(plan, origins=origins.found, published=published, notes=(*notes, *plan.notes), **fields)


def published_rates(name: str, origins: FigureOrigins) -> str:
    """What a preset of failures is, where a figure of it was taken."""
    from megasdc.lab.planning.checkpoints.rates import PRESETS

    preset = PRESETS[name]
    taken = any(origin.startswith(f"preset {name}") for origin in origins.found.values())
    return f"preset {name}: {preset.source}; {preset.note}; rates are scaled linearly with devices" if taken else ""


def choose_saves(
    options: SaveOptions, run: RunCosts | None, sections: MegasdcSection | None, origins: FigureOrigins
) -> dict[str, Any]:
    """What steps and saves cost, by the names of ``Costs``: as given, else as the run measured, else as assumed."""
    saves = ""
    if run is not None and run.size_bytes is not None:
        saves = f"median of {run.saves:,} saves of the run, of {run.size_bytes / 1e6:,.1f} MB"
    step_s = origins.choose("step_s", options.step_s, (run and run.step_s, "speed/step_s of the run"))
    stall_s = origins.choose("disk_stall_s", options.disk_stall_s, (run and run.stall_s, saves))
    measured_s = run.duration_s if run and options.disk_stall_s is None else None
    duration_s = origins.choose(
        "disk_duration_s",
        options.disk_duration_s,
        (measured_s and max(measured_s, stall_s), saves),
        (stall_s, "the stall: nothing is written in the background"),
    )
    memory_s = origins.choose(
        "memory_stall_s", options.memory_stall_s, (run and run.memory_stall_s, "median of the run's snapshots")
    )
    origins.found.setdefault("memory_stall_s", "no snapshots")
    kept = sections is not None and sections.checkpoint.memory.partners is not False
    origins.found["partners"] = "--partners" if options.partners else "`checkpoint.memory`" if kept else "no copies"
    return {
        "step_s": step_s,
        "memory_stall_s": memory_s,
        "partners": options.partners or (kept and memory_s is not None),
        "disk_stall_s": stall_s,
        "disk_duration_s": duration_s,
    }
