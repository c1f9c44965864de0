"""Are the longest and the mean latency those of a fault that is followed step by step?"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from megasdc.config.detection import AuditSection
from megasdc.sdc.cost import Cadence
from megasdc.sdc.coverage import EVERY_STEP, Rotation, in_turn, latency, of_audits, of_micro_batches

Sees = Callable[[int, int], bool]
"""Whether a step sees a place."""


def followed(sees: Sees, places: int, period: int, save: int, *, ahead: bool = False) -> tuple[int, float, int, float]:
    """Longest and mean steps and checkpoints, over all first steps and places: each fault is followed until seen."""
    steps, saves = [], []
    begin = 10 * period
    for place in range(places):
        for first in range(begin, begin + math.lcm(period, save)):
            step, saved = first, 0
            saved += ahead and (first - 1) % save == 0 and not sees(first, place)
            while not sees(step, place):
                saved += step % save == 0 and not (ahead and sees(step + 1, place))
                step += 1
            steps.append(step - first + 1)
            saves.append(saved)
    return max(steps), sum(steps) / len(steps), max(saves), sum(saves) / len(saves)


def told(rotation: Rotation, save: int) -> tuple[int, float, int, float]:
    """The same by ``latency``."""
    one = latency("", rotation, save)
    assert one.checkpoints is not None and one.mean_checkpoints is not None
    return one.steps, one.mean_steps, one.checkpoints, one.mean_checkpoints


@pytest.mark.parametrize("save", [1, 4, 6, 25])
@pytest.mark.parametrize(
    "cadence", [Cadence(1), Cadence(2), Cadence(4), Cadence(5), Cadence(6), Cadence(1, 3)], ids=str
)
def test_micro_batches(cadence: Cadence, save: int) -> None:
    """By the rotation that a run uses; also where the looks at one micro-batch are not equally far apart."""

    def sees(step: int, place: int) -> bool:
        return place in cadence.looked_at(step, 6)

    assert told(of_micro_batches(cadence, 6), save) == pytest.approx(followed(sees, 6, 6 * cadence.every, save))


@pytest.mark.parametrize("save", [1, 4, 25])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_and_slices(every: int, save: int, ahead: bool) -> None:
    """Blocks of the state are looked at before a save too; slices are due between two looks at results."""
    cadence, places = Cadence(1, every), 5

    def block(step: int, place: int) -> bool:
        return bool(cadence.looked_at(step, 5)) and cadence.turn(step) % places == place

    def slice_of(step: int, place: int) -> bool:
        return cadence.slices(step) and cadence.turn(step) % places == place

    period = places * every
    rotation = in_turn(cadence, places, ahead=ahead)
    assert told(rotation, save) == pytest.approx(followed(block, places, period, save, ahead=ahead))
    rotation = in_turn(cadence, places, first=every // 2)
    assert told(rotation, save) == pytest.approx(followed(slice_of, places, period, save))


@pytest.mark.parametrize("after_saves", [False, True])
@pytest.mark.parametrize(("interval", "save"), [(7, 5), (10, 5), (4, 6), (1, 3), (6, 1)])
def test_audits(interval: int, save: int, after_saves: bool) -> None:
    """By the rule that a run uses; an audit after each save sees it before the next."""
    audit = AuditSection(enabled=True, interval=interval, verify_checkpoints=after_saves)
    period = math.lcm(interval, save)
    expected = followed(lambda step, _: audit.is_due(step, save), 1, period, save)
    assert told(of_audits(audit, save), save) == pytest.approx(expected)
    assert not after_saves or expected[2] <= 1


def test_what_a_budget_decides_is_bounded() -> None:
    """No cadence that it may choose is slower; without saves there are no checkpoints to count."""
    most = latency("", of_micro_batches(Cadence(1, 9), 4), 10, at_most=True)
    assert most.at_most and most.checkpoints is not None and most.mean_checkpoints is not None
    for cadence in (Cadence(4), Cadence(3), Cadence(1), *(Cadence(1, every) for every in range(2, 10))):
        one = told(of_micro_batches(cadence, 4), 10)
        bounds = (most.steps, most.mean_steps, most.checkpoints, most.mean_checkpoints)
        assert all(mine <= bound for mine, bound in zip(one, bounds, strict=True)), cadence
    assert told(EVERY_STEP, 10) == (1, 1.0, 0, 0.0)
    assert latency("", EVERY_STEP, 0).checkpoints is None
