"""Figures of runs compared with a healthy one: losses, differences, gradient norms, parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megasdc.lab.checkpoints.drift import DriftReport
from megasdc.lab.report.run_pages.compared import EVAL_LOSS, LOSS, common, relative_difference
from megasdc.ops.run_folder.record import RunRecord
from megasdc.output.figure import Figure, Series, axis_of, curve, layout, line_look, log_axis, over_steps, rule

HEIGHT = 320


def compare_figures(names: Mapping[str, RunRecord]) -> list[Figure]:
    """Figures of several runs by unique label; the first is the healthy one."""
    healthy, *_ = names.values()
    found = [
        _together("losses", "Training loss, nats per token", LOSS, names),
        _difference("loss_difference", "Training loss against the healthy run", LOSS, names),
        _together("eval_losses", "Evaluation loss, nats per token", EVAL_LOSS, names),
        _difference("eval_difference", "Evaluation loss against the healthy run", EVAL_LOSS, names),
        _together("gradient_norms", "Gradient norm", "train/grad_norm", names),
    ]
    return [one for one in found if one.traces and (healthy.series or one.name.endswith("es"))]


def _curves(series: Mapping[str, Series], names: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    traces = []
    for name, one in series.items():
        place = names.index(name)
        colour, dash = line_look(place)
        own: dict[str, Any] = (
            {"opacity": 0.55} if place == 0 else {}
        )  # wide and pale, since the other curves often coincide with it
        width = 5 if place == 0 else 1.5
        traces.append(curve(name, one, colour, line={"dash": dash, "width": width}, **options, **own))
    return traces


def _together(name: str, title: str, metric: str, runs: Mapping[str, RunRecord]) -> Figure:
    series = {label: run.series[metric] for label, run in runs.items() if metric in run.series}
    options = {"mode": "lines+markers"} if metric == EVAL_LOSS else {}
    drawn = layout(HEIGHT, legend=True, yaxis=axis_of(*series.values()))
    return over_steps(name, title, "", _curves(series, list(runs), **options), drawn, series)


def together(name: str, title: str, metric: str, runs: Mapping[str, RunRecord]) -> Figure | None:
    """A metric of several runs, by unique label, none of which the others are held against; None: none has it."""
    series = {label: run.series[metric] for label, run in runs.items() if metric in run.series}
    if not series:
        return None
    options: dict[str, Any] = {"mode": "lines+markers"} if metric == EVAL_LOSS else {}
    traces = []
    for place, (label, one) in enumerate(series.items()):
        colour, dash = line_look(place)
        traces.append(curve(label, one, colour, line={"dash": dash}, **options))
    drawn = layout(HEIGHT, legend=True, yaxis=axis_of(*series.values()))
    return over_steps(name, title, "", traces, drawn, series)


def _difference(name: str, title: str, metric: str, runs: Mapping[str, RunRecord]) -> Figure:
    healthy, *others = runs
    series = {}
    for label in others:
        steps, ours, theirs = common(runs[healthy].series.get(metric), runs[label].series.get(metric))
        if len(steps):
            series[label] = Series(steps, relative_difference(ours, theirs))
    options = {"mode": "lines+markers"} if metric == EVAL_LOSS else {}
    axis = {"tickformat": ".3~%", "nticks": 7}
    drawn = layout(HEIGHT, legend=True, shapes=[rule("var(--faint)", y=0, dash="solid")], yaxis=axis)
    caption = f"(loss / loss of {healthy} - 1), at steps that both have reported; above 0 is worse."
    return over_steps(name, title, caption, _curves(series, list(runs), **options), drawn, series)


def drift_figure(report: DriftReport, names: Mapping[str, str]) -> Figure:
    """Parameter difference over the steps of which both runs keep checkpoints; ``names`` by folder of checkpoints."""
    series, equal = {}, []
    for folder in report.runs:
        found = report.of(folder)
        if found:
            steps = np.array([one.step for one in found], dtype=np.int64)
            series[names[folder]] = Series(steps, np.array([one.whole.relative for one in found]))
            equal += [f"{names[folder]} at step {one.step:,}" for one in found if one.equal]
    order = list(names.values())
    values = np.concatenate([one.values for one in series.values()]) if series else np.array([])
    traces = _curves({name: one.positive for name, one in series.items()}, order, mode="lines+markers")
    caption = (
        f"Norm of the difference over the norm of {order[0]}, of all parameters, at the checkpoints that both keep, as "
        "Ma et al. 2025 (arXiv 2502.12340) follow it."
    )
    if equal:
        caption += f" Equal in every bit, and so not drawn: {', '.join(equal)}."
    drawn = layout(HEIGHT, legend=True, yaxis=log_axis(values))
    return over_steps("parameters", "Parameter difference", caption, traces, drawn, series, told=False)
