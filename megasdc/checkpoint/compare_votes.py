"""Which of several contents is expected to be right? None is trusted for being named first."""

from __future__ import annotations

from collections.abc import Sequence

MOST = "what most checkpoints hold"
INTACT = "what lies in files that are as they were saved, which the others are not"


def find_expected(votes: list[int], states: Sequence[Sequence[bool | None]]) -> tuple[int, str]:
    """Which of several classes of equal content is expected to be right.

    Args:
        votes: checkpoints in each.
        states: of each member of each, whether its files are as they were saved.

    Returns:
        The place of the class, the first where nothing tells, and why; empty: nothing tells.
    """
    most = [place for place, count in enumerate(votes) if count == max(votes)]
    if len(most) == 1:
        return most[0], MOST
    intact = [place for place in most if True in states[place]]
    if len(intact) == 1 and all(state is False for place in most if place != intact[0] for state in states[place]):
        return intact[0], INTACT
    return 0, ""


def all_intact(changed: Sequence[bool | None]) -> bool | None:
    """Whether files are as they were saved; None: not known of all.

    Args:
        changed: of each what ``View.changed`` says.
    """
    if any(changed):
        return False
    return True if all(one is False for one in changed) else None
