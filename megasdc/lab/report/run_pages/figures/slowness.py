"""Figure of stragglers: the time of the slowest ranks over that of their peers, over the steps of a run."""

from __future__ import annotations

from typing import Any

from megasdc.output.figure import COLOURS, Figure, Series, curve, layout, over_steps

HEIGHT = 230
MAX_RANKS = len(COLOURS)
"""Maximum of curves; the ranks that were slowest at any time."""


def slowness_figure(ratios: dict[int, Series], lines: list[dict[str, Any]]) -> Figure | None:
    """Curves of the slowest ranks; ``lines``: through every figure. None where nothing was compared."""
    if not ratios:
        return None
    slowest = sorted(ratios, key=lambda rank: -float(ratios[rank].values.max()))[:MAX_RANKS]
    series = {f"rank {rank}": ratios[rank] for rank in sorted(slowest)}
    coloured = zip(series.items(), COLOURS, strict=False)
    traces = [curve(name, one, colour, mode="lines+markers") for (name, one), colour in coloured]
    few = f" The {len(series)} slowest of {len(ratios):,} are drawn." if len(series) < len(ratios) else ""
    caption = f"Of a micro-batch, without waiting, against the same stage of other replicas, last 40 steps.{few}"
    drawn = layout(HEIGHT, legend=True, shapes=lines)
    return over_steps("slowness", "Time of a rank over that of its peers", caption, traces, drawn, series)
