"""Simulations of DropCompute as a page: time of a step, the best threshold, and the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence

from megasdc.lab.planning.simulate import SimulationResult, SimulationResults
from megasdc.lab.report.run_pages.figures.drops import HEIGHT, drop_rate_figure, histogram, threshold_figure
from megasdc.output.figure import COLOURS, Figure, layout, scatter
from megasdc.output.page import Cell, Page, PageSection, Table, number_cell


def simulation_page(result: SimulationResults) -> Page:
    """The page of simulations.

    Figures are of the last number of replicas: distribution of compute times, completed share, speed of steps and S_eff
    against the threshold, and S_eff against the drop rate; for all numbers: E[T] and the best S_eff. The paper's
    Figures 2 to 4 show these quantities.
    """
    last = result.results[-1]
    return Page(
        title="DropCompute, simulated",
        verdict=f"DropCompute, simulated: {_describe(last)}",
        sections=[
            PageSection(tables=[_times(result.results), _best(result.results)]),
            PageSection(f"{last.simulation.replicas:,} replicas", figures=_figures_of(last)),
            PageSection("By the number of replicas", figures=_growth(result.results)),
        ],
    )


def _describe(result: SimulationResult) -> str:
    """The simulated setting in one line."""
    one, moments = result.simulation, result.moments
    rule = "finished" if one.rule.finish else "lost"
    return (
        f"{one.micro_batches} micro-batches, {one.stages} stage(s), Tc {one.communication_s:g} s; latency of a "
        f"micro-batch on a stage {moments.mean_s:.4g} s, standard deviation {moments.std_s:.3g} s, largest "
        f"{moments.largest_s:.3g} s; in progress at the threshold: {rule}"
    )


def _times(results: Sequence[SimulationResult]) -> Table:
    rows = []
    for result in results:
        one, error, formulas = result.simulation, result.longest_error_s, result.formulas
        margin = "" if error is None else f" ±{1.96 * error:.2g}"
        given = (formulas.longest_s, formulas.exact_longest_s) if formulas else (None, None)
        rows.append(
            (one.replicas, one.num_steps, number_cell(float(result.curve.longest_s.mean()), more=margin), *given)
        )
    headings = ("replicas", "steps drawn", "E[T]", "eq. 4", "exact, normal")
    title = "compute time of a step without drops, s"
    return Table("compute_times", headings, rows, searched=False, title=title)


def _best(results: Sequence[SimulationResult]) -> Table:
    rows = []
    for result in results:
        best, planned = result.at(result.best), f" of {result.simulation.training_steps:,}"
        rows.append(
            (
                result.simulation.replicas,
                number_cell(best["tau_s"], missing="never drop"),
                _with_formula(best["speedup"], ".3f", best["formula_speedup"]),
                _with_formula(best["completed"], ".2f", best["formula_completed"]),
                number_cell(best["drop_rate"], ".1%"),
                best["time_s"],
                number_cell(best["extra_steps"], ",d", more=planned),
            )
        )
    headings = ("replicas", "tau, s", "S_eff", "M~", "dropped", "step, s", "extra steps")
    return Table("best_thresholds", headings, rows, searched=False, title="best threshold", note=_note(results[0]))


def _with_formula(value: float, form: str, formula: float | None) -> Cell:
    return number_cell(value, form, more="" if formula is None else f" ({formula:.3g})")


def _note(result: SimulationResult) -> str:
    rate, formulas = result.simulation.max_drop_rate, result.formulas
    said = [f"S_eff: samples per second over those without drops, of thresholds that drop at most {rate:.0%}."]
    if formulas is None:
        said.append("There are no formulas: they are for one stage, and for latencies that vary.")
    else:
        shown = "E[T] alone" if formulas.speedup is None else "in brackets too"
        said.append(f"Formulas, {shown}: they take latencies as independent and times of replicas as normal.")
    if result.simulation.rule.finish:
        said.append("Started micro-batches are finished, so a step may last longer than tau.")
    return " ".join(said)


def _figures_of(result: SimulationResult) -> list[Figure]:
    marks = {"E[T]": float(result.curve.longest_s.mean())}
    if result.formulas and result.formulas.longest_s is not None:
        marks["eq. 4"] = result.formulas.longest_s
    if (tau_s := result.at(result.best)["tau_s"]) is not None:
        marks["tau"] = tau_s
    caption = "Share of replicas and steps."
    points = "Points are simulated, lines are formulas. " if result.formulas else ""
    return [
        histogram("times", "Compute time of a replica", caption, result.replica_times_s, "replicas", marks),
        threshold_figure(result.curve, f"{points}Completed share: M~ / M.", result.formulas),
        drop_rate_figure(result.curve, result.formulas),
    ]


def _growth(results: Sequence[SimulationResult]) -> list[Figure]:
    best = [result.at(result.best) for result in results]
    times: dict[str, list[float | None]] = {
        "E[T]": [float(result.curve.longest_s.mean()) for result in results],
        "eq. 4": [result.formulas.longest_s if result.formulas else None for result in results],
        "exact, normal": [result.formulas.exact_longest_s if result.formulas else None for result in results],
    }
    gains: dict[str, list[float | None]] = {
        "best S_eff": [one["speedup"] for one in best],
        "formula at the same tau": [one["formula_speedup"] for one in best],
    }
    replicas = [result.simulation.replicas for result in results]
    return [
        _by_replicas("growth", "E[T]", "s", replicas, times),
        _by_replicas("gains", "best S_eff", "", replicas, gains),
    ]


def _by_replicas(name: str, title: str, unit: str, replicas: list[int], lines: dict[str, list[float | None]]) -> Figure:
    traces = [
        scatter(label, replicas, values, colour, "%{x:,} replicas: %{y:.4g}", mode="lines+markers")
        for (label, values), colour in zip(lines.items(), COLOURS, strict=False)
    ]
    drawn = layout(HEIGHT, "replicas", unit, legend=True, xaxis={"type": "log"})
    return Figure(name, f"{title} against replicas", "", traces, drawn, {"replicas": replicas, **lines})
