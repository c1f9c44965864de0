"""Vote on which of several contents is expected to be right; being named first gives no preference."""

from __future__ import annotations

from collections.abc import Sequence

MOST = "what most checkpoints hold"
INTACT = "what lies in files that are as they were saved, which the others are not"


def find_expected(votes: list[int], states: Sequence[Sequence[bool | None]]) -> tuple[int, str]:
    """The index of the class of equal content that is expected to be right, and why; 0 and "" if it cannot be decided.

    ``votes``: number of checkpoints in each class; ``states``: for each member of each class, whether its files are as
    they were saved (None: not known).
    """
    most = [place for place, count in enumerate(votes) if count == max(votes)]
    if len(most) == 1:
        return most[0], MOST
    intact = [place for place in most if True in states[place]]
    if len(intact) == 1 and all(state is False for place in most if place != intact[0] for state in states[place]):
        return intact[0], INTACT
    return 0, ""


def all_intact(changed: Sequence[bool | None]) -> bool | None:
    """Whether all files are as they were saved; None: not known of all."""
    if any(changed):
        return False
    return True if all(one is False for one in changed) else None
