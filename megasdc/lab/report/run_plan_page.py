"""Plan of a run as a page: effective training time, where the rest goes, spares, and what raises it most."""

from __future__ import annotations

from collections.abc import Iterator

from megasdc.common.words import duration
from megasdc.lab.planning.runs.measured import PARTS as PARTS_OF_RUN
from megasdc.lab.planning.runs.measured import Prediction, shares_of
from megasdc.lab.planning.runs.run_plan import DAY_S, RunPlan
from megasdc.lab.planning.runs.simulation import FIRST_START, LOST
from megasdc.output.figure import COLOURS, Figure, bars, layout, named_axis, scatter
from megasdc.output.page import Cell, Page, PageSection, Table, number_cell

_HEIGHT = 320
_Z95 = 1.96


def run_plan_page(plan: RunPlan) -> Page:
    """The page of a plan of a run."""
    fleet = plan.fleet
    tables = [_causes(plan), _investments(plan)]
    if plan.predictions:
        tables.append(_predictions(plan))
    return Page(
        title="Plan of a run",
        verdict=f"{fleet.devices:,} devices, {fleet.hosts:,} hosts, {plan.days:g} days: {plan.training:.2%} "
        f"±{100 * _Z95 * plan.error:.2f} of the time is training, in 9 of 10 runs {plan.low:.2%} to {plan.high:.2%}",
        sentences=list(_sentences(plan)),
        notes=plan.notes,
        sections=[
            PageSection(tables=tables, figures=list(_figures(plan))),
            PageSection(tables=[_rates(plan), _inputs(plan)]),
        ],
    )


def _sentences(plan: RunPlan) -> Iterator[str]:
    fleet, spares = plan.fleet, plan.spares
    yield (
        f"a failure every {duration(1 / fleet.per_s, 1)}; saves: {_saves(plan)}; "
        f"by formula, if none waits for a spare, {plan.expected:.2%}"
    )
    yield "of the time: " + ", ".join(f"{name} {share:.2%}" for name, share in plan.parts.items())
    yield (
        f"spares: {spares.needed:,} are needed so that less than {spares.chance:.2g} of the replaced hosts find none; "
        f"with the {fleet.spares:,} of this fleet {spares.waited:.2%} of {spares.replaced:,.0f} waited; "
        f"{spares.in_repair:,.1f} hosts are in repair on average"
    )
    yield f"corruption that nothing finds, in no part of the time: {plan.missed:.2g} times in the run, expected"


def _saves(plan: RunPlan) -> str:
    memory, disk = ("none" if one is None else f"every {one:,.0f} steps" for one in vars(plan.intervals).values())
    return f"in memory {memory}, on the disk {disk}"


def _causes(plan: RunPlan) -> Table:
    rows = []
    for one in plan.causes:
        shares = [number_cell(100 * one.lost[part], ".3f") for part in LOST]
        rows.append(
            (one.name, number_cell(one.failures, ",.1f"), *shares, number_cell(100 * sum(one.lost.values()), ".3f"))
        )
    totals = [sum(one.lost[part] for one in plan.causes) for part in LOST]
    failures = number_cell(sum(one.failures for one in plan.causes), ",.1f")
    rows.append(("all", failures, *(number_cell(100 * one, ".3f") for one in (*totals, sum(totals)))))
    return Table(
        "causes",
        ("cause", "failures", *LOST, "all"),
        rows,
        searched=False,
        title="what failures cost, % of the time",
        note=f"of a run of {plan.days:g} days, mean of {plan.trials:,} simulated ones",
    )


def _investments(plan: RunPlan) -> Table:
    rows = [
        (
            one.name,
            number_cell(one.training, ".2%"),
            number_cell(100 * one.gain, "+.3f", more=f" ±{100 * _Z95 * one.error:.3f}"),
            number_cell(one.gain * plan.days, "+,.2f"),
        )
        for one in plan.investments
    ]
    return Table(
        "investments",
        ("what", "training", "points", "days of training"),
        rows,
        searched=False,
        title="what buys most",
        note="points: percentage points of training time, with the 95 % interval; both fleets see the same draws",
    )


def _predictions(plan: RunPlan) -> Table:
    rows = []
    for one in plan.predictions:
        failures = ", ".join(f"{count} {name}" for name, count in one.failures.items()) or "none"
        failures += f"; {one.early} in starts" if one.early else ""
        rows.append(
            (
                one.path,
                failures,
                "other runs" if one.others else "its own",
                *_shares(*one.shares),
                f"{one.low:.1%} to {one.high:.1%}",
                _apart(one),
            )
        )
    if len(rows) > 1:
        rows.append((f"all {len(rows)} runs", "", "", *_shares(*shares_of(plan.predictions)), "", ""))
    return Table(
        "predictions",
        ("run", "failures", "pieces", "predicted", "measured", "points", "9 of 10", "predicted and measured s"),
        rows,
        searched=False,
        title="productive share of supervised runs",
        note="predicted: mean of simulated runs with as many failures, at random moments, with the starts, detection "
        "and decisions of these pieces",
        elsewhere=("predicted and measured s",),
    )


def _shares(predicted: float, measured: float) -> tuple[Cell, ...]:
    return (
        number_cell(predicted, ".1%"),
        number_cell(measured, ".1%"),
        number_cell(100 * (predicted - measured), "+.1f"),
    )


def _apart(one: Prediction) -> str:
    return ", ".join(f"{part} {one.predicted[part]:,.1f} {one.measured[part]:,.1f}" for part in PARTS_OF_RUN)


def _rates(plan: RunPlan) -> Table:
    rows = []
    for one in plan.fleet.causes:
        per_day = one.per_device_hour * plan.fleet.devices * DAY_S / 3600
        rows.append(
            (
                one.name,
                number_cell(one.per_device_hour, ".3g"),
                number_cell(per_day, ",.3g"),
                number_cell(one.detection_s, ",.3g"),
                number_cell(one.replaced, ".0%"),
                _from(plan, one.name),
            )
        )
    headings = ("cause", "of a device in an hour", "in a day", "detection, s", "host replaced", "from")
    return Table("rates", headings, rows, searched=False, title="how it fails", note=plan.published)


def _from(plan: RunPlan, cause: str) -> str:
    """Where the figures of a cause come from, figures of one origin together."""
    found: dict[str, list[str]] = {}
    for figure in ("rate", "detection", "replaced"):
        found.setdefault(plan.origins.get(f"{figure} {cause}", ""), []).append(figure)
    return "; ".join(f"{', '.join(figures)}: {origin}" for origin, figures in found.items() if origin)


def _inputs(plan: RunPlan) -> Table:
    fleet, costs, audits = plan.fleet, plan.fleet.costs, plan.fleet.audits
    saves = ("step_s", "memory_stall_s", "partners", "disk_stall_s", "disk_duration_s")
    values: dict[str, str] = {
        **{name: _value(getattr(costs, name)) for name in saves},
        **{name: _value(value) for name, value in vars(costs).items() if name.startswith("restart_")},
        "start_per_host_s": f"{fleet.start_per_host_s:g} s",
        "deciding_s": duration(fleet.deciding_s, 1),
        "audit_steps": f"{audits.interval:,}",
        "audit_coverage": f"{audits.coverage:.0%}",
        "step_coverage": f"{audits.step_coverage:.0%}",
        "audit_cost": f"{audits.cost:.1%} of a step",
        "spares": f"{fleet.spares:,}",
        "repair_hours": duration(fleet.repair_s, 1),
        "intervals": _saves(plan),
    }
    rows = [(name, value, plan.origins.get(name, "")) for name, value in values.items()]
    return Table("inputs", ("figure", "value", "from"), rows, searched=False, title="what was counted with")


def _value(value: float | bool | None) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "none"
    return duration(value, 1)


def _figures(plan: RunPlan) -> Iterator[Figure]:
    names = [one.name for one in plan.causes if one.name != FIRST_START]
    shares = {part: [100 * one.lost[part] for one in plan.causes if one.name != FIRST_START] for part in LOST}
    traces = [bars(part, names, shares[part], COLOURS[place], "%{x}: %{y:.3f} %") for place, part in enumerate(LOST)]
    drawn = layout(_HEIGHT, y="% of the time", legend=True, barmode="stack", xaxis=named_axis(names))
    yield Figure("lost_by_cause", "What failures cost, by cause", "", traces, drawn, {"cause": names, **shares})
    ranked = [one.name for one in plan.investments][::-1]
    gains = [100 * one.gain for one in plan.investments][::-1]
    errors = {"type": "data", "array": [100 * _Z95 * one.error for one in plan.investments][::-1]}
    bought = bars("gain", gains, ranked, COLOURS[0], "%{y}: %{x:+.3f}", orientation="h", error_x=errors)
    drawn = layout(_HEIGHT, "percentage points of training time", yaxis=named_axis(ranked))
    said = "With the 95 % interval."
    yield Figure("gains", "What buys most", said, [bought], drawn, {"what": ranked, "points": gains})
    yield _sizes(plan)


def _sizes(plan: RunPlan) -> Figure:
    devices, shares = [size for size, _ in plan.sizes], [share for _, share in plan.sizes]
    traces = [
        scatter("formula", devices, shares, COLOURS[0], "%{x:,} devices: %{y:.2%}"),
        scatter("simulated", [plan.fleet.devices], [plan.training], COLOURS[1], "%{y:.2%}", mode="markers"),
    ]
    axis = {"type": "log", "exponentformat": "none", "nticks": 6}
    drawn = layout(_HEIGHT, "devices", legend=True, xaxis=axis, yaxis={"tickformat": ".0%", "range": [0, 1]})
    said = "By formula, each size with the intervals of saves that are best there, if no failure waits for a spare."
    return Figure(
        "sizes", "Training time by the number of devices", said, traces, drawn, {"devices": devices, "training": shares}
    )
