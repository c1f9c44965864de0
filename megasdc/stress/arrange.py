"""Which hosts are tested together, so that a wrong one can be named, and whom do wrong groups accuse?

A collective over many hosts that goes wrong says only that one of them is. So hosts meet in pairs, each round with
other partners: whoever is wrong is in every wrong pair, and two different pairs have at most one host in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

Pair = frozenset[str]

MAX_CULPRITS = 6
"""Hosts that explain one connected set of wrong pairs at most; beyond that nobody is named."""


def pairings(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair of hosts once, in sets whose pairs have no host in common and can be tested side by side.

    Args:
        hosts: distinct names.

    Returns:
        One set of pairs a turn: n - 1 of them, or n with an odd number of hosts, of which one rests each turn.

    Source: the circle method of round-robin tournaments.
    """
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half, turns = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        turns.append([(a, b) for a, b in opposite if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [turn for turn in turns if turn]


def turns_of_round(number: int, turns: int, meetings: int) -> list[int]:
    """Which sets of pairs a round takes, so that the rounds go through all of them.

    Args:
        number: of the round, first is 1.
        turns: how many sets there are.
        meetings: how many a round takes, if there are so many.
    """
    taken = min(meetings, turns)
    return [((number - 1) * taken + place) % turns for place in range(taken)]


def name_culprits(wrong: Collection[Pair]) -> tuple[set[str], set[str]]:
    """Whom do wrong pairs accuse? The fewest hosts that explain all of them.

    Args:
        wrong: pairs in which something was wrong.

    Returns:
        Hosts that every smallest explanation holds; and hosts of which one or another does, so that none can be named.
    """
    named: set[str] = set()
    suspects: set[str] = set()
    for part in _connected(wrong):
        covers = _smallest_covers(part)
        if covers:
            common = covers[0].intersection(*covers[1:])
            named |= common
            suspects |= covers[0].union(*covers[1:]) - common
        else:
            suspects |= set().union(*part)
    return named, suspects


def _connected(pairs: Collection[Pair]) -> list[list[Pair]]:
    """Pairs by the sets of hosts that they connect."""
    parts: list[tuple[set[str], list[Pair]]] = []
    for pair in sorted(pairs, key=sorted):
        touched = [part for part in parts if part[0] & pair]
        parts = [part for part in parts if part not in touched]
        parts.append(
            (set(pair).union(*(hosts for hosts, _ in touched)), [p for _, own in touched for p in own] + [pair])
        )
    return [own for _, own in parts]


def _smallest_covers(pairs: Sequence[Pair]) -> list[set[str]]:
    """All smallest sets of hosts that meet every pair; none if they would have more than ``MAX_CULPRITS``."""
    for size in range(1, MAX_CULPRITS + 1):
        covers = {frozenset(cover) for cover in _covers(pairs, frozenset(), size)}
        if covers:
            return [set(cover) for cover in covers]
    return []


def _covers(pairs: Sequence[Pair], chosen: frozenset[str], size: int) -> Iterator[frozenset[str]]:
    open_pair = next((pair for pair in pairs if not pair & chosen), None)
    if open_pair is None:
        yield chosen
    elif len(chosen) < size:
        for host in sorted(open_pair):
            yield from _covers(pairs, chosen | {host}, size)
