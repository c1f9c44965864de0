"""Phases of a rank: what it may be doing, and whom it waits for while it does."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What a rank is doing; the numbers are those of the shared record and never change meaning."""

    START = 0
    """Built, before its first step."""
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    SEND_ACTIVATION = 4
    RECEIVE_ACTIVATION = 5
    SEND_GRADIENT = 6
    RECEIVE_GRADIENT = 7
    REDUCTION = 8
    """Sums of gradients and totals over tensor ranks, stages and replicas."""
    OPTIMIZER = 9
    """Norm, update, and the gathering of parameters."""
    AGREEMENT = 10
    """What all ranks agree on at the end of a step."""
    BETWEEN = 11
    """Between steps: hooks that are none of the following."""
    EVALUATION = 12
    SAVE = 13
    DONE = 14
    """This rank takes no more steps: its last hooks have run, or it has failed."""
    TRAINING = 15
    """Anything between the first collective of a program and its end, where no more is known of it."""

    @property
    def label(self) -> str:
        """As people read it."""
        return self.name.lower().replace("_", " ")


SLOW = frozenset({Phase.START, Phase.EVALUATION, Phase.SAVE, Phase.BETWEEN, Phase.TRAINING})
"""Phases that may rightly take long, however short they were before: they have a larger least limit."""
COLLECTIVE = frozenset(
    {
        *(Phase.REDUCTION, Phase.OPTIMIZER, Phase.AGREEMENT, Phase.EVALUATION, Phase.SAVE, Phase.BETWEEN),
        Phase.TRAINING,
    }
)
"""Phases in which a rank may wait for ranks of other replicas."""
NEIGHBOUR = {
    Phase.RECEIVE_ACTIVATION: -1,
    Phase.SEND_ACTIVATION: 1,
    Phase.RECEIVE_GRADIENT: 1,
    Phase.SEND_GRADIENT: -1,
}
"""Offset of the pipeline stage that a rank waits for in a transfer."""
