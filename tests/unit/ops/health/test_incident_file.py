"""A damaged report is left out with a sentence, whatever is damaged: how a launch ends does not depend on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from megasdc.common.addresses import Address
from megasdc.common.errors import TraceError
from megasdc.ops.health.incident import INCIDENT_FOLDER, conclude
from megasdc.ops.health.incident_file import load_hangs
from megasdc.ops.launch.launch_verdict import lines_of, of_incident, read_met
from megasdc.sdc.incident import (
    DisputedRank,
    Environment,
    Incident,
    IncidentEvidence,
    RankPlace,
    incident_from_json,
    incident_to_json,
)

STATE = {"rank": 1, "host": "b", "pp_rank": 0, "tp_rank": 0, "dp_rank": 1, "step": 7, "micro_batch": 0, "phase": 2}
GROUP = {"ranks": [0, 1], "joined": 5, "ended": 4, "recent": {"5": "all_reduce [4096] Float"}}
DAMAGED = (
    None,
    "x",
    "",
    [],
    ["x"],
    {},
    {"x": 1},
    -1,
    10**30,
    1e300,
    float("inf"),
    float("nan"),
    "r.²",
    f"r.{'9' * 5000}",
)


def damaged(whole: Any) -> Iterator[Any]:
    """Copies, in each of which one value is another one or is absent."""
    for path in _places(whole):
        for value in DAMAGED:
            copy = deepcopy(whole)
            inner = copy
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            yield copy
        copy = deepcopy(whole)
        inner = copy
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        yield copy


def _places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*before, key)
        yield from _places(value[key], (*before, key))


def test_a_damaged_report_of_a_standstill_is_left_out(tmp_path: Path) -> None:
    """Or what is damaged changes nothing that is read: a launch that ended well says what it met, and ends well."""
    folder = tmp_path / "health" / INCIDENT_FOLDER
    states = [STATE | {"rank": rank, "stuck_s": 9.0, "groups": {"data": GROUP}} for rank in (0, 1)]
    report = {"states": states, "stacks": {"1": {"MainThread": ["f"]}}, "run": "r.2.x", "launch": "l", "devices": []}
    found = conclude(tmp_path / "health", ["b"], [report | {"addresses": []}], [])
    found.write()
    (whole,), notes = load_hangs(tmp_path)
    assert (whole.attempt, whole.step, whole.launch, len(whole.stacks), notes) == (2, 7, "l", 1, [])
    assert whole.states[0].groups["data"].recent == {5: "all_reduce [4096] Float"}
    num_left_out = 0
    for one in damaged(dict(found.incident)):
        found.path.write_text(json.dumps(one))
        hangs, notes = load_hangs(tmp_path)
        assert len(hangs) + len(notes) == 1
        num_left_out += len(notes)
        assert len(lines_of(read_met(tmp_path, lambda launch: True))) == 2 * len(hangs)
        assert all(isinstance(one.label + one.doing, str) for hang in hangs for one in hang.states)
    assert num_left_out > 100
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("a file")
    assert load_hangs(tmp_path)[0] == () and read_met(tmp_path) == []


def test_a_damaged_report_of_corruption_is_left_out() -> None:
    """A supervisor asks it for its time and its ranks."""
    place = RankPlace(1, "b", "cpu", 1, 0, 0)
    differs = DisputedRank(**vars(place), first=Address(1, 0, "forward", "x", "output"), got=None)
    whole = Incident(
        *("2026-01-01T00:00:00+00:00", "run", 1, 0, "audit", "persistent", "relative to the majority", "halt"),
        *("halted", (), (differs,), (place,), IncidentEvidence(1, {}), Environment({}, {}, "fp32")),
    )
    text = incident_to_json(whole)
    assert incident_from_json(text) == whole
    num_left_out = 0
    for one in damaged(json.loads(text)):
        try:
            read = incident_from_json(json.dumps(one))
        except TraceError:
            num_left_out += 1
            continue
        assert of_incident(Path("page"), read).hosts and read.place < (2**200,)
        assert all(suspect.rank >= 0 for suspect in read.suspects)
    assert num_left_out > 100
