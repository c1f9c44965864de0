"""Steps and checkpoints until a check sees a fault that stays, from when the check looks at which part of a step.

A fault stays at one place - micro-batch, block, element or product - from some step on; each first step and each place
are equally likely. Steps are counted from the first that uses what is wrong to the one that looks at it, both
included: 1 means at once. Checkpoints are those that were saved with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megasdc.config.sections.detection import AuditSection
from megasdc.sdc.budget import Cadence


@dataclass(frozen=True)
class Rotation:
    """When a check looks at a place, again and again.

    Args:
        looks: steps of a period in which it looks at the first place, ascending, from 0 to ``period - 1``.
        period: steps after which all repeats.
        apart: steps from a look at one place to the look at the next; all of them are within a period. 0: one place.
        ahead: what a step looks at is looked at before a save of the step before, too.
    """

    looks: tuple[int, ...] = (0,)
    period: int = 1
    apart: int = 0
    ahead: bool = False

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Each look at the first place, and the steps since the one before."""
        before = (self.looks[-1] - self.period, *self.looks)
        return [(look, look - last) for last, look in zip(before, self.looks, strict=False)]


EVERY_STEP = Rotation()


@dataclass(frozen=True)
class Latency:
    """How long a fault that stays is unseen.

    Args:
        check: what sees it.
        steps: most.
        mean_steps: in the mean over first steps and places.
        checkpoints: most that hold it; None: the run saves at its end alone.
        mean_checkpoints: their mean.
        at_most: whether the numbers are bounds, since a budget decides how often the check looks.
    """

    check: str
    steps: int
    mean_steps: float
    checkpoints: int | None
    mean_checkpoints: float | None
    at_most: bool = False


def in_turn(cadence: Cadence, places: int, *, first: int = 0, ahead: bool = False) -> Rotation:
    """Of a check that looks at one of so many places in each step that looks."""
    return Rotation((first,), places * cadence.every, cadence.every, ahead)


def of_micro_batches(cadence: Cadence, of: int) -> Rotation:
    """Of a check that looks at micro-batches of a step, as many as ``cadence`` says, of ``of``."""
    shared = math.gcd(of, cadence.micro_batches)
    places, looked = of // shared, cadence.micro_batches // shared
    turns = (turn for turn in range(places) if -turn * looked % places < looked)
    return Rotation(tuple(turn * cadence.every for turn in turns), places * cadence.every, cadence.every)


def of_audits(audit: AuditSection, save_interval: int) -> Rotation:
    """Of audits that are due by the number of the step."""
    after_saves = bool(audit.verify_checkpoints and save_interval)
    period = math.lcm(audit.interval, save_interval) if after_saves else audit.interval
    due = set(range(0, period, audit.interval))
    due |= {(save + 1) % period for save in range(0, period, save_interval)} if after_saves else set()
    return Rotation(tuple(sorted(due)), period)


def latency(check: str, rotation: Rotation, save_interval: int, *, at_most: bool = False) -> Latency:
    """Latency of a check.

    Args:
        save_interval: steps between checkpoints; 0: none but at the end.
        at_most: the check may look more often; then checkpoints are those of the worst places of looks between saves.
    """
    gaps = rotation.gaps
    steps = max(gap for _, gap in gaps)
    mean = sum(gap * (gap + 1) / 2 for _, gap in gaps) / rotation.period
    if not save_interval:
        return Latency(check, steps, mean, None, None, at_most)
    shared = save_interval if at_most else math.gcd(rotation.period, save_interval)
    shifts = 1 if at_most else shared // math.gcd(rotation.apart or shared, shared)
    most, total = 0, 0.0
    for shift in range(shifts):
        for look, gap in gaps:
            # Saves are ``nearest`` steps before a look, or a multiple of ``shared`` more, all equally often.
            nearest = 1 if at_most else (look + shift * rotation.apart - rotation.ahead) % shared or shared
            if nearest < gap:
                saves = (gap - 1 - nearest) // shared + 1
                most = max(most, (gap - 1 - nearest) // save_interval + 1)
                total += saves * (gap - nearest) - shared * saves * (saves - 1) / 2
    return Latency(check, steps, mean, most, total * shared / save_interval / shifts / rotation.period, at_most=at_most)
