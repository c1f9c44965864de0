"""The literal order of hooks, without a run."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise

import pytest

from megasdc.engine.hooks import PURPOSES, Hook, Slot
from megasdc.features import ORDER

ELSEWHERE = (
    *("megasdc.faults.delay", "megasdc.faults.drill", "megasdc.faults.process", "megasdc.faults.stored"),
    *("megasdc.lab.studies.hook", "megasdc.lab.studies.replica_link", "megasdc.ops.archive.hook"),
    *("megasdc.ops.health.hooks.links", "megasdc.ops.health.hooks.progress", "megasdc.ops.health.hooks.stragglers"),
    *("megasdc.train.detection.step_checker", "megasdc.train.drop_compute", "megasdc.train.gradient_bounds"),
    *("megasdc.train.isolation", "megasdc.train.local_sgd", "megasdc.train.trace"),
)
"""Files with hooks that only runs that ask for them import."""


def _subclasses(kind: type) -> set[str]:
    return {kind.__name__}.union(*(_subclasses(one) for one in kind.__subclasses__()))


def test_lines_stand_in_the_order_of_slots() -> None:
    """As the literal is read, so hooks are called; each slot has a purpose."""
    places = [list(Slot).index(line.slot) for line in ORDER]
    assert all(one <= other for one, other in pairwise(places))
    assert list(PURPOSES) == list(Slot)


@pytest.mark.parametrize("line", ORDER, ids=lambda line: line.hook)
def test_lines_name_hooks(line) -> None:
    """The name of a line is that of a class of hooks, once."""
    for module in ELSEWHERE:
        import_module(module)
    assert line.hook in _subclasses(Hook) and [one.hook for one in ORDER].count(line.hook) == 1
