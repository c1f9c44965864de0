"""What a step's replays and records say of its cause: hardware, data or optimizer; pure.

A replay is the same steps again, from a checkpoint before them, with the same data and settings: bit for bit the same,
unless hardware computed something else. So bits come first. Only where they agree is it asked what the step did: which
of its numbers is far from those of the steps before (``far_from``), and whether few documents or many made it so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megasdc.metrics.writer import StepDetails

Verdict = Literal["hardware", "data", "optimizer", "nothing", "inconclusive"]

FAR = 6.0
"""Robust deviations from the median above which a number is anomalous."""
LEAST_SCALE = 0.01
"""A robust deviation counts as at least this share of the median."""
LEAST_BEFORE = 8
"""Values before a step without which it is not known what is usual."""
FEW_SAMPLES = 0.25
"""Share of a step's samples up to which those that are far from the others are few."""
LARGER_UPDATE = 5.0
"""Times the median of the steps before above which an update over its weight, or a gradient over its moment, is large.
"""
LEAST_UPDATES = 3
"""Replayed steps before the step without which it is not known how large updates are."""


@dataclass(frozen=True)
class StepComparison:
    """What was compared bit by bit.

    Args:
        compared: values; 0: nothing could be compared.
        first: the first that differs, as a sentence; None: all are equal.
        rank: that computed it, where a trace tells.
        host: of that rank in the replay.
        foreign: other versions or devices on the two sides, a text each, which may round otherwise.
        note: why something was not compared; empty: nothing was left out.
    """

    compared: int
    first: str | None = None
    rank: int | None = None
    host: str | None = None
    foreign: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Far:
    """A number of the step that is far from those of the steps before; ``deviations``: signed, robust."""

    name: str
    value: float
    usual: float
    deviations: float


@dataclass(frozen=True)
class FarSample:
    """A sample whose loss is far from the others'; ``place``: replica, micro-batch, number in it."""

    place: tuple[int, int, int]
    loss: float
    usual: float
    deviations: float


@dataclass(frozen=True)
class LargeUpdate:
    """A parameter whose update, or gradient, is large for what it was in the steps before; ``times`` their median."""

    name: str
    what: Literal["update over weight", "gradient over moment"]
    value: float
    times: float


@dataclass(frozen=True)
class StepEvidence:
    """All that is known of a step.

    Args:
        replays: the second replay against the first.
        same_hosts: whether both ran on the same hosts.
        recorded: the run's own records against the first replay.
        found: what the checks of a replay found themselves, which ended it; None: nothing.
        far: numbers of the step that are anomalous; None: too few steps before it are known.
        samples: those whose losses are anomalous.
        num_samples: of the step.
        non_finite: parameters whose gradient has NaN or Inf.
        updates: large ones; None: too few steps before it were replayed.
    """

    replays: StepComparison
    same_hosts: bool
    recorded: StepComparison
    found: str | None = None
    far: Sequence[Far] | None = None
    samples: Sequence[FarSample] = ()
    num_samples: int = 0
    non_finite: Sequence[str] = ()
    updates: Sequence[LargeUpdate] | None = None


@dataclass(frozen=True)
class TriageConclusion:
    """A verdict and why, a sentence each."""

    verdict: Verdict
    because: list[str]


def decide_triage(evidence: StepEvidence) -> TriageConclusion:
    """The verdict on a step: hardware by bits, then data or optimizer by what the step did."""
    return _by_bits(evidence) or _by_numbers(evidence)


def _by_bits(evidence: StepEvidence) -> TriageConclusion | None:
    replays, recorded = evidence.replays, evidence.recorded
    if evidence.found is not None:
        return TriageConclusion("hardware", [f"A replay's own checks found silent data corruption: {evidence.found}."])
    if replays.first is not None:
        if replays.foreign:
            return _foreign("The replays differ", replays)
        where = "transient or intermittent" if evidence.same_hosts else "some of these hosts compute something else"
        hosts = "the same hosts" if evidence.same_hosts else "other hosts"
        return TriageConclusion(
            "hardware", [f"Two replays, the second on {hosts}, differ: {replays.first}. The fault is now: {where}."]
        )
    if recorded.first is not None:
        if recorded.foreign:
            return _foreign("The replays agree, and the run recorded something else", recorded)
        return TriageConclusion(
            "hardware",
            [
                f"The replays agree with each other, and the run recorded something else: {recorded.first}. It was hit "
                "at that step or before it, after the checkpoint that the replays began from, and the fault was not "
                "there in the replays."
            ],
        )
    return None


def _foreign(what: str, difference: StepComparison) -> TriageConclusion:
    return TriageConclusion(
        "inconclusive",
        [
            f"{what}: {difference.first}. But versions or devices are others, which may round otherwise: "
            f"{'; '.join(difference.foreign)}."
        ],
    )


def _by_numbers(evidence: StepEvidence) -> TriageConclusion:
    agree = "The replays agree in every bit"
    if not evidence.replays.compared:
        agree = "There is one replay"
    because = [
        f"{agree}, and with what the run recorded."
        if evidence.recorded.compared
        else f"{agree}; the run recorded nothing of these steps, so that a fault of its own is not excluded."
    ]
    samples, updates = evidence.samples, evidence.updates or ()
    if samples and len(samples) <= FEW_SAMPLES * evidence.num_samples:
        because.append(
            f"The losses of {len(samples)} of {evidence.num_samples} samples are far from the others': the documents "
            "of these are the cause."
        )
        return TriageConclusion("data", because)
    anomalous = [*(f"{one.name} is {one.value:.4g}, usual is {one.usual:.4g}" for one in evidence.far or ())]
    anomalous += [f"the gradient of {name} has NaN or Inf" for name in evidence.non_finite]
    moved = [one for one in updates if one.what == "update over weight"]
    if not (anomalous or moved):
        if evidence.far is None:
            because.append(f"Fewer than {LEAST_BEFORE} steps before it are known, so not what is usual.")
            return TriageConclusion("inconclusive", because)
        because.append("Nothing of the step is far from the steps before it.")
        return TriageConclusion("nothing", because)
    because.append(f"Unusual: {'; '.join(anomalous)}." if anomalous else "Loss and gradient norm are usual.")
    if updates:
        first = updates[0]
        because.append(
            f"It is spread over the samples, and {len(updates)} parameters have a large {first.what}: of {first.name} "
            f"{first.times:.3g} times that of the steps before."
        )
        return TriageConclusion("optimizer", because)
    because.append(
        "It is spread over the samples, and too few steps before it were replayed to know the usual size of updates."
        if evidence.updates is None
        else "It is spread over the samples, and no update or gradient is large for its parameter."
    )
    return TriageConclusion("inconclusive", because)


def deviations(value: float, usual: Sequence[float]) -> float | None:
    """Signed robust deviations of a value from the median of the usual ones; None: they are too few.

    A deviation is 1.4826 times the median distance from the median, the standard deviation where values are normal,
    and at least ``LEAST_SCALE`` of the median. A value that is not finite is infinitely far.
    """
    known = [one for one in usual if math.isfinite(one)]
    if len(known) < LEAST_BEFORE:
        return None
    if not math.isfinite(value):
        return math.inf
    median = statistics.median(known)
    scale = 1.4826 * statistics.median(abs(one - median) for one in known)
    scale = max(scale, LEAST_SCALE * abs(median))
    return (value - median) / scale if scale else (0.0 if value == median else math.inf)


def find_far(values: Mapping[str, float], before: Mapping[str, Sequence[float]]) -> list[Far] | None:
    """The numbers of a step that are far above those of the steps before; None: too few are known."""
    found, known = [], False
    for name, value in values.items():
        far = deviations(value, before.get(name, ()))
        if far is None:
            continue
        known = True
        if far > FAR:
            found.append(Far(name, value, statistics.median(filter(math.isfinite, before[name])), far))
    return found if known else None


def find_far_samples(step: StepDetails, before: Sequence[StepDetails]) -> list[FarSample]:
    """Samples whose loss is far from all others', of the step and of the steps before, most anomalous first."""
    own = [
        ((one.replica, one.micro_batch, number), loss) for one in step.samples for number, loss in enumerate(one.losses)
    ]
    others = [loss for details in before for one in details.samples for loss in one.losses]
    found = []
    for place, loss in own:
        usual = [*others, *(other for at, other in own if at != place)]
        far = deviations(loss, usual)
        if far is not None and abs(far) > FAR:
            found.append(FarSample(place, loss, statistics.median(filter(math.isfinite, usual)), far))
    return sorted(found, key=lambda one: -abs(one.deviations))


def find_large_updates(step: StepDetails, before: Sequence[StepDetails]) -> list[LargeUpdate] | None:
    """Parameters with a large update or gradient for what the steps before had, largest first; None: too few steps."""
    if len(before) < LEAST_UPDATES:
        return None
    found = []
    for name, details in step.parameters.items():
        ratios: tuple[tuple[Literal["update over weight", "gradient over moment"], str, str], ...] = (
            ("update over weight", "update_norm", "weight_norm"),
            ("gradient over moment", "gradient_norm", "moment_norm"),
        )
        for what, above, below in ratios:
            own = _ratio(getattr(details, above), getattr(details, below))
            usual = [
                _ratio(getattr(one.parameters[name], above), getattr(one.parameters[name], below))
                for one in before
                if name in one.parameters
            ]
            known = [one for one in usual if one is not None and one > 0]
            if own is None or len(known) < LEAST_UPDATES:
                continue
            times = own / statistics.median(known)
            if not times <= LARGER_UPDATE:
                found.append(LargeUpdate(name, what, own, times))
    return sorted(found, key=lambda one: -one.times)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
