"""Address of an observation in a run, the same on every rank, node and restart.

No torch: configurations, events and files name addresses too.
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD = "forward", "recompute", "backward", "weight_grad"
ACCUMULATED_GRAD, REDUCED_GRAD, UPDATE, PARAMETER = "accumulated_grad", "reduced_grad", "update", "parameter"
PHASES = (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD, ACCUMULATED_GRAD, REDUCED_GRAD, UPDATE, PARAMETER)
"""Phases in the order in which a step runs them.

forward, recompute: a submodule's own result, before a collective mixes ranks. backward: the gradient of its input,
likewise. weight_grad: what one micro-batch adds to the gradient of a parameter. accumulated_grad: that gradient over
all micro-batches of this replica, after the sums over tied stages and tensor ranks, just before the sum over replicas.
reduced_grad, update: this rank's shard after the reduction and after the optimizer. parameter: after the all-gather.
"""
MICRO_BATCH_PHASES = PHASES[:4]
"""Phases that belong to one micro-batch; the others belong to a step."""
REPLICA_PHASES = PHASES[:5]
"""Phases whose values involve no other replica."""


OF_AUDIT = -1
"""``micro_batch`` of an extra micro-batch that an audit computes besides those of the step."""


def which_micro_batch(number: int | None) -> str:
    """Text on the micro-batch, to follow the step in a sentence; ``number``: ``micro_batch`` of an ``Address``."""
    if number == OF_AUDIT:
        return ", the extra micro-batch of the audit"
    return "" if number is None else f", micro-batch {number}"


@dataclass(frozen=True)
class Address:
    """One observation of one rank.

    Args:
        step: optimizer step, first is 1.
        micro_batch: micro-batch in the step, first is 0; None in phases that belong to the whole step; ``OF_AUDIT``.
        phase: one of ``PHASES``.
        fqn: full dotted name of the submodule; its first number is the index of its layer in the whole pipeline.
        slot: name of the submodule's tensor, such as ``output``, ``input``, ``weight``, ``exp_avg``.
    """

    step: int
    micro_batch: int | None
    phase: str
    fqn: str
    slot: str

    def __str__(self) -> str:
        return f"step {self.step}{which_micro_batch(self.micro_batch)}, {self.phase} of {self.fqn} ({self.slot})"
