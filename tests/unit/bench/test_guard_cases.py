"""Does the campaign of guards draw each kind of fault in each training, and only faults that can be named?"""

from __future__ import annotations

from collections import Counter

from tools.bench.guard.cases import CLEAN, KINDS, OF_TWO, PHASES, TRAININGS, UNIT, UNITS, draw_cases
from tools.bench.guard.options import GuardOptions
from tools.trainings.engines import PERSISTENT, PIPELINE


def test_all_kinds_directions_and_types_come_in_turn() -> None:
    """Each once in the default campaign."""
    options = GuardOptions()
    cases = draw_cases(options.drawn, options.trainings, options.seed)
    faulty = Counter((one.name, one.kind, one.precision, one.planted.phase) for one in cases if one.planted is not None)
    assert len(faulty) == len(TRAININGS) * (len(KINDS) - 1) * len(PHASES) * 2 and set(faulty.values()) == {1}
    clean = Counter((one.name, one.precision) for one in cases if one.kind == CLEAN)
    assert len(clean) == 2 * len(TRAININGS) and set(clean.values()) == {3}


def test_faults_are_where_they_can_be_named() -> None:
    """Of two replicas anywhere; of a unit in the first product of its sizes; on a rank there is."""
    for one in draw_cases(list(TRAININGS), 600, 3):
        assert one.ranks == {OF_TWO: 2, UNIT: 1}.get(one.kind, 3) * (2 if one.name == PIPELINE else 1)
        assert (one.sizes is not None) == (one.kind == UNIT) and one.permuted == (one.kind in (UNIT, CLEAN))
        if one.planted is None:
            continue
        assert one.planted.rank < one.ranks
        if one.kind in (OF_TWO, UNIT):
            assert one.planted.kind == PERSISTENT and (one.kind == OF_TWO or "norm" not in one.planted.submodule)
        if one.kind == UNIT:
            assert (one.planted.submodule, one.sizes) in UNITS[one.name == PIPELINE, one.planted.phase]
