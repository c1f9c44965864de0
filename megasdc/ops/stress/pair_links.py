"""Links of pairs of hosts in a stress test: round trips, bandwidth and losses each way, beside the pair's values.

They are of the host network, between the first processes of two hosts. A slow link says nothing about a host's
results: verdicts stay as they are, and slow links are a finding of their own, with exit code 78.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from megasdc.common.wire import SECRET_BYTES, Door, connect, own_address_towards
from megasdc.ops.health.links.judgement import LinkFigures, SlowLink, combined, judge_links, name_places
from megasdc.ops.health.links.probe import ProbePlan, follow, lead
from megasdc.ops.launch.hosts import without_user
from megasdc.ops.stress.state import LINKS, HostState

PLAN = ProbePlan(pings=20, transfers=5, payload_bytes=2 << 20)
KEPT = 10
"""Last measurements of a pair that are kept."""
WorkerId = tuple[str, int]
Ask = Callable[[Mapping[WorkerId, Mapping[str, Any]]], dict[WorkerId, dict[str, Any]]]
"""Sends tasks to processes and returns their answers."""


class LinkEnd:
    """One end of a link, in a process of a host; ``timeout_s`` is of a wait for the other end and of a measurement."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._door: Door | None = None

    def open(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Listen for the other end on the route to its host ``towards`` alone, for who knows the ``token``.

        Returns ``failed``, or ``address`` and ``port``.
        """
        self.close()
        try:
            self._door = Door(own_address_towards(task["towards"]), bytes.fromhex(task["token"]))
        except OSError as error:
            return {"failed": f"it cannot listen on the route to {task['towards']}: {error}"}
        return {"failed": None, "address": self._door.address, "port": self._door.port}

    def close(self) -> None:
        """Listen no more, where the other end could not and no measurement followed."""
        if self._door is not None:
            self._door.close()
            self._door = None

    def measure(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Measure with the other end as ``task`` says; returns ``failed``, and the ``figures`` where this end leads."""
        door, self._door = self._door, None
        try:
            if door is None:
                first, second = task["pair"]
                place = task["address"], task["port"], bytes.fromhex(task["token"])
                with connect(*place, {}, self._timeout_s) as connection:
                    figures = lead(connection, PLAN, first, second, self._timeout_s)
                    return {"failed": None, "figures": figures.as_dict()}
            with door, door.accept(self._timeout_s)[1] as connection:
                follow(connection, PLAN, self._timeout_s)
        except OSError as error:
            return {"failed": str(error) or repr(error), "figures": None}
        return {"failed": None, "figures": None}


def measure_pairs(
    pairs: Sequence[tuple[str, str]], ask: Ask, tokens: Callable[[int], str]
) -> dict[tuple[str, str], Any]:
    """Measure pairs without a common host at the same time; returns what the leading end of each answered.

    Args:
        pairs: of hosts; the first leads.
        ask: see ``Ask``.
        tokens: returns so many random bytes as hexadecimal digits.
    """
    secret = {pair: tokens(SECRET_BYTES) for pair in pairs}
    opened = ask(
        {(pair[1], 0): {"do": "open_link", "towards": without_user(pair[0]), "token": secret[pair]} for pair in pairs}
    )
    tasks: dict[WorkerId, dict[str, Any]] = {}
    answers: dict[WorkerId, dict[str, Any]] = {}
    for first, second in pairs:
        door = opened.get((second, 0))
        if door is not None and door["failed"] is None:
            task = {"do": "link", "token": secret[first, second], "pair": [first, second], **door}
            tasks |= {(first, 0): task, (second, 0): task}
        elif door is not None:
            answers |= {(end, 0): {**door, "figures": None} for end in (first, second)}
    answers |= ask(tasks)
    return {pair: answers[pair[0], 0] for pair in pairs if all((end, 0) in answers for end in pair)}


def add_figures(states: Mapping[str, HostState], answers: Mapping[tuple[str, str], Any], number: int) -> None:
    """Keep measurements of a round in the state of the first host of each pair; failures become notes."""
    for (first, second), said in answers.items():
        if said["failed"] is not None:
            states[first].add_note(f"the link with {second} was not measured in round {number}: {said['failed']}")
            continue
        kept = states[first].links.setdefault(second, [])
        kept.append(said["figures"])
        del kept[:-KEPT]


@dataclass(frozen=True)
class LinksReport:
    """Links of all pairs that were measured; ``pairs``: how many pairs the hosts have."""

    figures: Sequence[LinkFigures]
    slow: Mapping[str, Sequence[SlowLink]]
    pairs: int

    @property
    def is_fit(self) -> bool:
        """Whether something was measured, and nothing was slow."""
        return bool(self.figures) and not self.slow

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "pairs": self.pairs,
            "measured": [one.as_dict() for one in self.figures],
            "slow": {place: [vars(one) for one in found] for place, found in self.slow.items()},
        }

    def lines(self) -> list[str]:
        """What was measured and what is slow, as sentences."""
        if not self.figures:
            return [f"links: none of {self.pairs} pairs of hosts was measured"]
        rtts = sorted(1e3 * one.rtt_s for one in self.figures)
        rates = sorted(one.payload_bytes / way.seconds / 1e6 for one in self.figures for way in one.ways().values())
        lines = [
            f"links: {len(self.figures):,} of {self.pairs:,} pairs of hosts measured, round trips {rtts[0]:,.3g} to "
            f"{rtts[-1]:,.3g} ms, {rates[0]:,.3g} to {rates[-1]:,.3g} MB/s"
        ]
        if len(self.figures) == 1:
            lines.append("links: one pair has no other to compare its round trip with; its directions were compared")
        for place, found in self.slow.items():
            for one in found:
                text = one.text if place == one.place else f"{one.place}: {one.text}"
                lines.append(f"{place}: slow link, {' and '.join(one.kinds)}: {text}")
        return lines


def report_links(states: Sequence[HostState]) -> LinksReport | None:
    """Judge the links; None where they were not asked for, or there is one host."""
    if len(states) < 2 or LINKS not in states[0].plan["only"]:
        return None
    figures = [
        combined([LinkFigures.from_dict(one) for one in kept]) for state in states for kept in state.links.values()
    ]
    pairs = len(list(combinations(states, 2)))
    return LinksReport(figures, name_places(judge_links(figures)), pairs)
