"""Do the compensations give back what was left out, as in the paper?"""

from __future__ import annotations

import itertools
import math

import pytest

from megasdc.dropcompute.compensation import expected_steps, extra_steps, larger_batch


def test_the_paper_s_numbers() -> None:
    """Giladi et al., section 4: with a tenth dropped, 11 % more steps or 11 % more micro-batches."""
    assert expected_steps(100_000, 0.1) == 111_112
    assert larger_batch(100, 0.1) == 112 and larger_batch(9, 0.1) == 10


@pytest.mark.parametrize(("steps", "per_step", "dropped"), [(9, 10, 1), (100, 64, 13), (50, 8, 6), (7, 3, 0)])
def test_extra_steps_end_when_as_much_is_completed_as_was_planned(steps: int, per_step: int, dropped: int) -> None:
    """A run that loses so many in each step, also in those it runs more, stops at the first step that is enough."""
    for step in itertools.count(1):
        if step >= steps + extra_steps(step * dropped, per_step):
            break
    completed = step * (per_step - dropped)
    assert completed >= steps * per_step > completed - (per_step - dropped)
    assert step == expected_steps(steps, dropped / per_step)


@pytest.mark.parametrize("micro_batches", range(1, 40))
def test_a_larger_batch_completes_the_wanted_number(micro_batches: int) -> None:
    """At the rate it was made for; one micro-batch less would not be enough."""
    for thousandths in range(0, 1000, 25):
        planned = larger_batch(micro_batches, thousandths / 1000)
        kept = 1000 - thousandths
        assert planned * kept >= micro_batches * 1000 > (planned - 1) * kept


def test_nothing_lost_nothing_more() -> None:
    """Without drops steps and micro-batches are as planned."""
    assert (extra_steps(0, 8), expected_steps(17, 0.0), larger_batch(5, 0.0)) == (0, 17, 5)
    assert math.isfinite(expected_steps(1000, 0.999))
