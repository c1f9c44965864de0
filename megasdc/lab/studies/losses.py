"""Losses of replicas: differences to the trusted one, and spikes. Pure, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megasdc.ops.run_folder.study_log import Line

SPIKE_WINDOW, SPIKE_DEVIATIONS = 20, 6.0
_MAD_TO_STD = 1.4826


@dataclass(frozen=True)
class LossRow:
    """The losses of one replica; a difference is its loss minus the trusted replica's."""

    replica: int
    steps: int
    last: float | None
    largest_difference: float | None
    largest_step: int | None
    last_difference: float | None
    not_finite: int
    spikes: list[int]


def loss_rows(lines: Iterable[Line]) -> list[LossRow]:
    """Losses, their difference to the trusted replica's, and spikes; each replica's lines are in the order of steps."""
    series: dict[int, list[Line]] = {}
    for line in lines:
        series.setdefault(line["replica"], []).append(line)
    found = []
    for replica, points in sorted(series.items()):
        apart = {
            line["step"]: line["loss"] - line["trusted_loss"]
            for line in points
            if line["loss"] is not None and line["trusted_loss"] is not None
        }
        largest = max(apart, key=lambda step: abs(apart[step]), default=None)
        places = loss_spikes([line["loss"] for line in points])
        found.append(
            LossRow(
                replica=replica,
                steps=len(points),
                last=points[-1]["loss"],
                largest_difference=None if largest is None else apart[largest],
                largest_step=largest,
                last_difference=apart.get(points[-1]["step"]),
                not_finite=sum(line["loss"] is None for line in points),
                spikes=[points[place]["step"] for place in places],
            )
        )
    return found


def loss_spikes(
    losses: Sequence[float | None], window: int = SPIKE_WINDOW, deviations: float = SPIKE_DEVIATIONS
) -> list[int]:
    """Indices of losses far above those just before them; one loss per step, None: not finite.

    A loss is a spike if it is more than ``deviations`` standard deviations above the median of the ``window`` finite
    losses before it, or if it is not finite. The standard deviation is estimated as 1.4826 times the median absolute
    deviation, at least 0.1 % of the median. A finite loss with fewer losses before it is no spike.
    """
    found, before = [], []  # type: list[int], list[float]
    for place, loss in enumerate(losses):
        if loss is None:
            found.append(place)
            continue
        if len(before) >= window:
            recent = before[-window:]
            middle = statistics.median(recent)
            spread = _MAD_TO_STD * statistics.median(abs(one - middle) for one in recent)
            if loss > middle + deviations * max(spread, 1e-3 * abs(middle)):
                found.append(place)
        before.append(loss)
    return found
