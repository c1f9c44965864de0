"""Is garbage collected at the stated steps and at no other time, and is every collection's time counted?"""

import gc
import weakref
from types import SimpleNamespace

import pytest

from megasdc.train import process
from megasdc.train.process import CollectionTimer, ManagedCollection


class _Node:
    """Garbage in a cycle, which only a collection frees."""

    def __init__(self):
        self.itself = self


def alive():
    return weakref.ref(_Node())


@pytest.fixture
def managed():
    hook = ManagedCollection(interval=3)
    hook.on_start(SimpleNamespace())
    yield hook
    hook.close()


def test_only_at_the_stated_steps(managed):
    """A cycle stays until the next step that is a multiple of the interval, however many objects are made."""
    assert not gc.isenabled()
    for step in (1, 2, 3, 4, 5, 6):
        if step % 3 == 1:
            node = alive()
        many = [[] for _ in range(100_000)]
        assert node() is not None and len(many) == 100_000
        managed.after_step(SimpleNamespace(step=step), None)
        assert (node() is None) == (step % 3 == 0)


def test_what_was_built_is_not_looked_at():
    """Objects from before the start are frozen, garbage among them is freed first; closing undoes both."""
    before, node = gc.get_freeze_count(), alive()
    hook = ManagedCollection(interval=1)
    hook.on_start(SimpleNamespace())
    assert node() is None and gc.get_freeze_count() > before + 1000
    hook.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.slow
def test_seconds_of_collections(monkeypatch):
    """Every collection while the timer is open counts, from its start to its stop; taking starts anew."""
    clock = iter([10.0, 10.25, 20.0, 20.5])
    monkeypatch.setattr(process.time, "perf_counter", lambda: next(clock))
    gc.disable()
    try:
        timer = CollectionTimer()
        gc.collect()
        gc.collect(0)
        assert timer.pop_seconds() == 0.75
        assert timer.pop_seconds() == 0.0
        timer.close()
        gc.collect()
        assert timer.pop_seconds() == 0.0 and timer._on_phase not in gc.callbacks
    finally:
        gc.enable()
