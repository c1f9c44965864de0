"""Do pairs meet as they should, and is whoever explains wrong ones named?"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from megasdc.ops.stress.arrange import MAX_CULPRITS, name_culprits, pairings, turns_of_round
from megasdc.ops.stress.run import MEETINGS


def hosts(number: int) -> list[str]:
    return [f"h{place}" for place in range(number)]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 9])
def test_every_pair_meets_once(number: int) -> None:
    """All turns together hold every pair exactly once; in one turn no host is in two pairs."""
    turns = pairings(hosts(number))
    met = [frozenset(pair) for turn in turns for pair in turn]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(hosts(number), 2)))
    for turn in turns:
        assert len({host for pair in turn for host in pair}) == 2 * len(turn)


def test_rounds_go_through_all_turns() -> None:
    """Each round takes so many turns, and after enough rounds each turn came."""
    assert turns_of_round(1, 1, 3) == [0]
    taken = [turns_of_round(number, 7, 3) for number in range(1, 8)]
    assert all(len(set(turns)) == 3 for turns in taken)
    assert {turn for turns in taken for turn in turns} == set(range(7))


@pytest.mark.parametrize("number", range(3, 9))
def test_a_single_wrong_host_is_named_in_the_first_round(number: int) -> None:
    """Of 3 to 8 hosts whichever is wrong in all its pairs is named by the pairs of one round, and nobody else."""
    turns = pairings(hosts(number))
    for culprit in hosts(number):
        pairs = [pair for turn in turns_of_round(1, len(turns), MEETINGS) for pair in turns[turn]]
        wrong = [frozenset(pair) for pair in pairs if culprit in pair]
        assert name_culprits(wrong) == ({culprit}, set())


def test_of_two_hosts_none_is_named() -> None:
    """One wrong pair alone leaves it open which side is wrong."""
    assert name_culprits([frozenset(("a", "b"))]) == (set(), {"a", "b"})
    assert name_culprits([]) == (set(), set())


def test_names_are_what_all_smallest_explanations_share() -> None:
    """Against a search through all sets of hosts: named are those in every smallest cover, suspect those in some."""
    random = np.random.default_rng(1)
    for _ in range(200):
        names = hosts(int(random.integers(2, 7)))
        every = [frozenset(pair) for pair in combinations(names, 2)]
        wrong = [pair for pair in every if random.random() < 0.4]
        covers = [
            set(chosen)
            for size in range(len(names))
            for chosen in combinations(names, size)
            if all(pair & set(chosen) for pair in wrong)
        ]
        least = [cover for cover in covers if len(cover) == min(map(len, covers))]
        shared = set.intersection(*least)
        assert name_culprits(wrong) == (shared, set.union(*least) - shared)


def test_too_many_wrong_hosts_name_nobody() -> None:
    """Where more hosts would be needed than are searched for, all are suspects; other parts are judged alone."""
    ring = [frozenset((f"r{place}", f"r{(place + 1) % 20}")) for place in range(20)]
    star = [frozenset(("x", "y")), frozenset(("x", "z"))]
    assert MAX_CULPRITS < 20 / 2
    assert name_culprits([*ring, *star]) == ({"x"}, {f"r{place}" for place in range(20)})
