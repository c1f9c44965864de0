"""What a stress test says of links, with which exit code, and what it does where one cannot be measured."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megasdc.ops.health.links.judgement import Direction, LinkFigures
from megasdc.ops.stress import pair_links
from megasdc.ops.stress.host_verdict import HEALTHY
from megasdc.ops.stress.pair_links import KEPT, LinkEnd, add_figures, measure_pairs, report_links
from megasdc.ops.stress.result import stress_outcome
from megasdc.ops.stress.state import HostState, load_state, save_state
from megasdc.output.page import print_page

PLAN = {"hosts": ["a", "b", "c"], "only": ["links"], "drill": None}


def figures(first: str, second: str, rtt_s: float = 1e-4) -> dict[str, Any]:
    """Of a link of 1 GB/s."""
    return LinkFigures(first, second, rtt_s, 0.0, 2_000_000, *[Direction(2e-3, 1400, 0)] * 2).as_dict()


def after_three_rounds(rtt_s: Mapping[tuple[str, str], float] | None = None) -> list[HostState]:
    """Three hosts after three rounds."""
    states = {name: HostState(name, PLAN, rounds=3) for name in "abc"}
    for number in range(1, 4):
        said = {
            pair: {"failed": None, "figures": figures(*pair, (rtt_s or {}).get(pair, 1e-4))}
            for pair in combinations("abc", 2)
        }
        add_figures(states, said, number)
    return list(states.values())


def test_a_slow_link_ends_with_78_and_leaves_hosts_healthy() -> None:
    """It is in the JSON and on the terminal; without it the code is 0."""
    assert stress_outcome(after_three_rounds()).exit_code == 0
    slow = stress_outcome(after_three_rounds({("a", "c"): 6e-3}))
    assert slow.exit_code == 78 and [one.status for one in slow.verdicts] == [HEALTHY] * 3
    assert set(json.loads(json.dumps(slow.as_dict()))["links"]["slow"]) == {"a - c"}
    text = io.StringIO()
    print_page(slow.page, Console(file=text, width=200))
    assert "links: 3 of 3 pairs of hosts measured, round trips 0.1 to 6 ms" in text.getvalue()
    assert "a - c: slow link, latency: round trip 6 ms, usual 0.1 ms" in text.getvalue()


def test_links_that_were_asked_for_and_not_measured_are_no_success() -> None:
    """78, with a note on what failed; where they were not asked for, or there is one host, nothing is said."""
    states = [HostState(name, PLAN, rounds=1) for name in "ab"]
    add_figures({one.host: one for one in states}, {("a", "b"): {"failed": "no route", "figures": None}}, 1)
    result = stress_outcome(states)
    assert result.exit_code == 78 and "no route" in result.verdicts[0].notes[0]
    (links,) = [line for line in result.page.sections[0].items if "link" in line and "no route" not in line]
    assert links == "links: none of 1 pairs of hosts was measured"
    assert report_links(states[:1]) is None
    assert report_links([replace(one, plan={**PLAN, "only": ["gemm"]}) for one in states]) is None


def test_figures_survive_a_resume_and_stay_few(tmp_path: Path) -> None:
    """They are part of a host's state; the oldest go."""
    first, *_ = states = after_three_rounds()
    for number in range(20):
        add_figures(
            {one.host: one for one in states}, {("a", "b"): {"failed": None, "figures": figures("a", "b")}}, number
        )
    save_state(tmp_path, first)
    assert load_state(tmp_path, "a", PLAN).links == first.links and len(first.links["b"]) == KEPT


def test_two_ends_measure_a_link_and_an_end_alone_says_why_not() -> None:
    """Over a real connection, as the processes of two hosts do; without the other end a failure, no exception."""
    from concurrent.futures import ThreadPoolExecutor

    ends = {"127.0.0.1": LinkEnd(5.0), "127.0.0.2": LinkEnd(5.0)}
    doors: list[dict[str, Any]] = []

    def ask(tasks: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
        if all(task["do"] == "open_link" for task in tasks.values()):
            doors.extend(ends[place[0]].open(task) for place, task in tasks.items())
            return dict(zip(tasks, doors, strict=True))
        with ThreadPoolExecutor() as pool:
            running = {place: pool.submit(ends[place[0]].measure, task) for place, task in tasks.items()}
            return {place: one.result() for place, one in running.items()}

    pair = ("127.0.0.1", "127.0.0.2")
    found = measure_pairs([pair], ask, secrets.token_hex)[pair]
    assert found["failed"] is None and LinkFigures.from_dict(found["figures"]).pair == pair
    assert [door["address"] for door in doors] == ["127.0.0.1"], "not on all addresses"
    alone = LinkEnd(0.2)
    asked = {"towards": "127.0.0.1", "token": secrets.token_hex(32)}
    task = {**asked, "pair": list(pair), **alone.open(asked)}
    assert alone.measure(task)["failed"]


def test_a_host_without_a_route_fails_its_pair_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other pairs are measured; it is no failure of a host."""

    def route(host: str) -> str:
        if host == "a":
            raise OSError(f"no route to {host}")
        return "127.0.0.1"

    monkeypatch.setattr(pair_links, "own_address_towards", route)
    ends = {name: LinkEnd(5.0) for name in "abcd"}

    def ask(tasks: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
        if any(task["do"] == "open_link" for task in tasks.values()):
            return {place: ends[place[0]].open(task) for place, task in tasks.items()}
        return {place: {"failed": None, "figures": {}} for place in tasks}

    found = measure_pairs([("a", "b"), ("c", "d")], ask, secrets.token_hex)
    assert found["c", "d"] == {"failed": None, "figures": {}}
    assert found["a", "b"]["figures"] is None and "no route to a" in found["a", "b"]["failed"]
    listening = next(end for end in ends.values() if end._door is not None)
    before = listening._door
    listening.open({"towards": "b", "token": secrets.token_hex()})
    assert before is not None and not before._thread.is_alive(), "who listens again has left the port before"
    for end in ends.values():
        end.close()
