"""Pairing of hosts for collectives, and identification of the faulty hosts from the pairs with wrong results.

A wrong collective over many hosts shows only that one of them is faulty. So hosts are tested in pairs, with other
partners in each round: a faulty host is in every wrong pair, and two different pairs have at most one host in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

Pair = frozenset[str]

MAX_CULPRITS = 6
"""Maximum of hosts that may explain one connected set of wrong pairs; beyond that, none is named."""


def pairings(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair of distinct hosts once, in sets whose pairs have no host in common and can be tested at the same time.

    For n hosts there are n - 1 sets; n if n is odd, with one idle host in each.

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
    """Indices of the sets of pairs in a round, first is 1; the rounds cycle through all ``turns`` sets.

    ``meetings``: maximum of sets in a round.
    """
    taken = min(meetings, turns)
    return [((number - 1) * taken + place) % turns for place in range(taken)]


def name_culprits(wrong: Collection[Pair]) -> tuple[set[str], set[str]]:
    """Hosts to blame for pairs with a wrong result: the smallest sets of hosts that explain all of them.

    Returns the hosts in every smallest explanation, and those in some of them only, which cannot be named for certain.
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
    """Pairs grouped into connected components of hosts."""
    parts: list[tuple[set[str], list[Pair]]] = []
    for pair in sorted(pairs, key=sorted):
        touched = [part for part in parts if part[0] & pair]
        parts = [part for part in parts if part not in touched]
        parts.append(
            (set(pair).union(*(hosts for hosts, _ in touched)), [p for _, own in touched for p in own] + [pair])
        )
    return [own for _, own in parts]


def _smallest_covers(pairs: Sequence[Pair]) -> list[set[str]]:
    """All smallest vertex covers of the pairs; none if they have more than ``MAX_CULPRITS`` hosts."""
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
