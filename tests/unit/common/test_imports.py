"""What is imported under ``frozen_imports`` is not searched for garbage, neither then nor later; it is what is used."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest

from megasdc.common import imports
from megasdc.common.imports import frozen_imports


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.enable()
    gc.unfreeze()


def test_what_is_made_inside_is_never_looked_at_again() -> None:
    """No collection runs inside; afterwards collections run, and leave out what was there."""
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        with frozen_imports():
            kept = [[] for _ in range(100_000)]  # many times what starts a collection
            assert seen == []
        assert gc.isenabled() and gc.get_freeze_count() >= len(kept)
        assert len(gc.get_objects()) < len(kept)
        later = [[] for _ in range(100_000)]
        assert len(seen) > 0 and len(later) == len(kept)
    finally:
        gc.callbacks.pop()


def test_who_collects_by_itself_goes_on_so() -> None:
    """Collections that were off before stay off; an error inside changes nothing of that."""
    gc.disable()
    with pytest.raises(ImportError), frozen_imports():
        raise ImportError("no such library")
    assert not gc.isenabled()


def test_what_is_not_used_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that a library only looks for is missing inside, and there afterwards; one that is in use stays."""
    monkeypatch.setattr(imports, "UNUSED", ("colorsys", "json"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with frozen_imports():
        with pytest.raises(ModuleNotFoundError, match="colorsys"):
            importlib.import_module("colorsys")
        assert importlib.import_module("json").dumps([]) == "[]"
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)
