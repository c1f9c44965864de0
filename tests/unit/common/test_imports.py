"""What is imported under ``imports_kept`` is not searched for garbage, neither then nor later."""

from __future__ import annotations

import gc

import pytest

from megasdc.common.imports import imports_kept


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
        with imports_kept():
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
    with pytest.raises(ImportError), imports_kept():
        raise ImportError("no such library")
    assert not gc.isenabled()
