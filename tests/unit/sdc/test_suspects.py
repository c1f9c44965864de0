"""Is a device that was found wrong known again, on whatever rank it is, and no other taken for it?"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasdc.parallel.dims import ParallelDims
from megasdc.sdc import finding
from megasdc.sdc.finding import Suspects

A0, A1, B0, B1 = ("a", "cpu-0"), ("a", "cpu-1"), ("b", "cpu-0"), ("b", "cpu-1")


def started(monkeypatch: pytest.MonkeyPatch, *places: tuple[str, str]) -> Suspects:
    """Of a run whose ranks are on these hosts and devices; what ranks tell each other is given."""
    gathered = [((name, "a processor", rank, 0, 0), device) for rank, (name, device) in enumerate(places)]
    monkeypatch.setattr(finding, "gather_objects", lambda own, group: gathered)
    host: Any = SimpleNamespace(
        engine=SimpleNamespace(device=torch.device("cpu")), dims=ParallelDims(1, 1, 1), host_group=None
    )
    found = Suspects()
    found.on_start(host)
    return found


def test_each_rank_is_remembered_by_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by that of another rank, and what was found before is kept."""
    found = started(monkeypatch, A0, A1, B0, B1)
    assert found.ranks == frozenset()
    found.add([1])
    assert found.ranks == {1}
    found.add([2, 3])
    assert found.ranks == {1, 2, 3}


def test_a_device_is_known_on_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a resume with other hosts, in another order or at another layout: the number of a rank says nothing."""
    first = started(monkeypatch, A0, A1, B0, B1)
    first.add([1, 2])
    state = json.loads(json.dumps(first.state()))
    for places, known in [
        ((B0, B1, A0, A1), {0, 3}),
        ((A0, B1), set()),
        ((("c", "cpu-1"), A1), {1}),
        ((B0, B0), {0, 1}),
    ]:
        then = started(monkeypatch, *places)
        assert then.load_state(state) == [] and then.ranks == known
        assert then.state() == state, "what is not here now is kept for the start after"


def test_numbers_of_the_version_before_accuse_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are handed back, to be told; what is known by place counts."""
    then = started(monkeypatch, A0, A1)
    assert then.load_state([0, ["a", "cpu-1"], 3]) == [0, 3]
    assert then.ranks == {1}
