"""How often checks look follows from what looking takes and from the budget."""

from __future__ import annotations

import pytest

from megasdc.sdc.budget import beyond
from megasdc.sdc.cost import MOST_EVERY, Cadence, TimeShares, choose_cadence


@pytest.mark.parametrize(
    ("shares", "chosen"),
    [
        (TimeShares(0.001, 0.0, 0.001, 0.0), Cadence(4)),
        (TimeShares(0.001, 0.0, 0.004, 0.0), Cadence(2)),
        (TimeShares(0.001, 0.004, 0.004, 0.0), Cadence(1)),
        (TimeShares(0.001, 0.0, 0.002, 0.006), Cadence(1)),
        (TimeShares(0.004, 0.0, 0.02, 0.004), Cadence(1, 4)),
        (TimeShares(0.0, 0.0, 0.0, 0.0), Cadence(4)),
        (TimeShares(0.009, 0.0, 0.5, 0.0), Cadence(1, MOST_EVERY)),
        (TimeShares(0.02, 0.0, 0.001, 0.0), Cadence(1, MOST_EVERY)),
    ],
    ids=["all", "some", "audits", "slices", "some steps", "nothing", "rarely", "no room"],
)
def test_as_much_as_the_budget_leaves_room_for(shares: TimeShares, chosen: Cadence) -> None:
    """Of four micro-batches, with a budget of 1 %."""
    assert choose_cadence(shares, 0.01, 4) == chosen
    if chosen.every < MOST_EVERY:
        assert chosen.share(shares) <= 0.01


@pytest.mark.parametrize(
    ("shares", "chosen"),
    [
        (TimeShares(0.009, 0.0, 0.05, 0.0), Cadence(1, MOST_EVERY)),
        (TimeShares(0.012, 0.0, 0.05, 0.0), Cadence(1, MOST_EVERY, 2)),
        (TimeShares(0.03, 0.004, 0.05, 0.0), Cadence(1, MOST_EVERY, 10)),
        (TimeShares(0.9, 0.0, 0.05, 0.0), Cadence(1, MOST_EVERY, MOST_EVERY)),
    ],
    ids=["room for each step", "every second", "audits", "no room"],
)
def test_comparisons_come_rarer_where_the_rarest_looks_leave_no_room(shares: TimeShares, chosen: Cadence) -> None:
    """With a budget of 1 %; steps that look, and those after them, are compared whatever the interval."""
    assert choose_cadence(shares, 0.01, 4, thins=True) == chosen
    assert choose_cadence(shares, 0.01, 4).apart == 1, "not unless asked for"
    assert chosen.share(shares) <= 0.01 or chosen.apart == MOST_EVERY
    compared = [step for step in range(100, 200) if chosen.compares(step)]
    assert len(compared) == pytest.approx(100 * chosen.compare_rate) and set(compared) >= {100, 101, 150, 151}
    assert all(step in compared for step in range(100, 200, chosen.apart))


@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("cadence", [Cadence(1), Cadence(2), Cadence(1, 3), Cadence(1, 50)], ids=str)
def test_everything_is_looked_at_within_the_period(cadence: Cadence, number: int) -> None:
    """From any step on; slices come in as many steps, between the looks where there is room."""
    for start in (1, 7):
        steps = range(start, start + cadence.period(number))
        looks = [cadence.looked_at(step, number) for step in steps]
        assert set().union(*looks) == set(range(number))
        assert all(len(one) in (0, min(cadence.micro_batches, number)) for one in looks)
        assert sum(map(cadence.slices, steps)) == sum(map(bool, looks))
    assert cadence.every == 1 or not any(cadence.slices(step) and cadence.looked_at(step, number) for step in range(99))


def test_advice_is_of_what_takes_most_time() -> None:
    """Audits that take nothing are not to be made more rarely, nor are others where those after checkpoints cost."""
    for audits, after_saves, advice in (
        (0.0, 0.0, "Larger micro-batches cost less"),
        (0.00001, 0.0, "Larger micro-batches cost less"),
        (0.02, 0.0, "Larger micro-batches cost less"),
        (0.04, 0.0, "A longer audit.interval costs less"),
        (0.07, 0.06, "A longer checkpoint.interval costs less"),
    ):
        told = beyond(TimeShares(0.03, audits, 0.1, 0.1), 0.01, after_saves=after_saves)
        assert told.endswith(f". {advice}")
        assert ("6.00% is of audits after checkpoints" in told) is (after_saves > 0), told
        assert ("of audits," in told) is (audits - after_saves > 0.001), told
    assert beyond(TimeShares(0.001, 0.02, 2.0, 0.0), 0.01).endswith("4.00% is of looks. Larger micro-batches cost less")
