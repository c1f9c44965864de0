"""Figures of rounds of Local-SGD, over the steps after which they were made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megasdc.localsgd.rounds import Round
from megasdc.ops.launch.launch_verdict import LATE, WRONG
from megasdc.ops.run_folder.record import RunRecord
from megasdc.output.figure import (
    Figure,
    Series,
    axis_of,
    curve,
    layout,
    line_look,
    named_axis,
    over_steps,
    scatter,
)

HEIGHT = 230
MEMBER = "took part"
_LOOKS = {
    MEMBER: ("square", "var(--good)"),
    LATE: ("hexagon", "var(--unsure)"),
    WRONG: ("x", "var(--bad)"),
}
"""Symbol and colour of each part of a replica in a round."""
MAX_MARKS = 1500
"""Maximum of marks of those that took part; those that did not are all drawn."""
EXCHANGE = "local_sgd/exchange_s"


def round_figures(rounds: Sequence[Round], every: int, runs: Mapping[str, RunRecord]) -> list[Figure]:
    """Who took part, weights, norms and seconds of the exchange; empty: no round was made.

    Args:
        every: steps of a round.
        runs: each replica that is read, by name.
    """
    if not rounds:
        return []
    replicas = sorted({one for of in rounds for one in (*of.members, *of.left_out, *of.absent)})
    tokens = {of.round: sum(of.tokens.values()) for of in rounds}
    found = [
        _members(rounds, every, replicas),
        _by_replica(
            ("weights", "Weight in a round, share of its tokens"),
            "What a round takes of each replica: its tokens over those of all members; 0: it was left out.",
            _series(rounds, every, replicas, lambda of, one: of.tokens.get(one, 0) / max(1, tokens[of.round])),
            {"tickformat": ".0%", "nticks": 6},
        ),
        _by_replica(
            ("outer_norms", "Norm of the outer gradient"),
            "Distance of a replica's weights, at the end of its local steps, from those that all began with. A gap: "
            "the round was made without it.",
            _series(rounds, every, replicas, lambda of, one: of.norms.get(one, math.nan)),
        ),
    ]
    seconds = {name: run.series[EXCHANGE] for name, run in runs.items() if EXCHANGE in run.series}
    if seconds:
        caption = "Until the others were there, their weights fetched, and the mean taken over; rank 0."
        found.append(_by_replica(("exchange", "Exchange of a round, seconds"), caption, seconds))
    return found


def _series(
    rounds: Sequence[Round], every: int, replicas: Sequence[int], value: Callable[[Round, int], float]
) -> dict[str, Series]:
    return {f"replica {one}": Series.of([(of.round * every, value(of, one)) for of in rounds]) for one in replicas}


def _by_replica(
    names: tuple[str, str], caption: str, series: Mapping[str, Series], axis: Mapping[str, object] | None = None
) -> Figure:
    """A curve for each replica; ``names``: name and title."""
    traces = []
    for place, (name, one) in enumerate(series.items()):
        colour, dash = line_look(place)
        traces.append(curve(name, one, colour, mode="lines+markers", line={"dash": dash}))
    drawn = layout(HEIGHT, legend=True, yaxis=dict(axis or axis_of(*series.values())))
    return over_steps(*names, caption, traces, drawn, series, told=False)


def _members(rounds: Sequence[Round], every: int, replicas: Sequence[int]) -> Figure:
    """A lane for each replica, with a mark for each round."""
    parts: dict[str, list[tuple[int, int, str]]] = {part: [] for part in _LOOKS}
    for of in rounds:
        for one in replicas:
            part = MEMBER if one in of.members else WRONG if one in of.left_out else LATE
            steps = f"{of.steps[one]} steps, {of.tokens[one]:,} tokens" if one in of.members else ""
            parts[part].append((of.round, one, steps or of.left_out.get(one, "late, or not there")))
    lanes = [f"replica {one}" for one in replicas]
    traces, left = [], ""
    for part, marks in parts.items():
        shown = marks
        if part == MEMBER and len(marks) > MAX_MARKS:
            shown = [marks[place] for place in np.unique(np.linspace(0, len(marks) - 1, MAX_MARKS).astype(int))]
            left = f" {len(shown):,} of {len(marks):,} marks of those that took part are drawn, evenly chosen."
        if not shown:
            continue
        symbol, colour = _LOOKS[part]
        text = [f"round {number}: {told}".replace("&", "&amp;").replace("<", "&lt;") for number, _, told in shown]
        x, y = [number * every for number, _, _ in shown], [f"replica {one}" for _, one, _ in shown]
        options = {"mode": "markers", "marker": {"symbol": symbol, "size": 9}, "text": text, "cliponaxis": False}
        traces.append(scatter(part, x, y, colour, "step %{x:,}<br>%{text}", **options))
    axis = named_axis(lanes[::-1]) | {"range": [-0.6, len(lanes) - 0.4]}
    drawn = layout(130 + 24 * len(lanes), legend=True, hovermode="closest", yaxis=axis)
    rows = [(number * every, number, one, part, told) for part, some in parts.items() for number, one, told in some]
    headings = ("step", "round", "replica", "part", "what")
    columns = {name: [row[place] for row in sorted(rows)] for place, name in enumerate(headings)}
    caption = f"A mark for each round, at the step after which it was made.{left}"
    return Figure("members", "Who took part in each round", caption, traces, drawn, columns, on_steps=True)
