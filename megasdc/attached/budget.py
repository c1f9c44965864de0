"""How often the checks of each step of an attached training look, so that they stay within ``sdc.budget``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megasdc.attached.training import Protection, Training
from megasdc.parallel.collectives import StepAgreement
from megasdc.sdc.budget import AuditPace, CheckBudget, CheckPlan
from megasdc.sdc.cost import Cadence


@dataclass(frozen=True)
class _Looks:
    """What a budget asks of an engine; looks of a guard see one micro-batch of a step."""

    device: torch.device
    most_micro_batches: int = 1


class GuardBudget(Protection):
    """Part of a guard that measures what looks take; the last to act after a step.

    A step's time is that from one optimizer step to the next, with what the loop does between them. With
    ``audit.longest_interval`` it measures audits, too, and how often they come follows.

    Args:
        is_audited: whether a step is audited.

    Attributes:
        checks: the budget of all looks, whose cadence they follow.
        begin: functions that are called with the number of each step once it is known whether it looks, and at once.
    """

    def __init__(self, training: Training, is_audited: Callable[[int], bool]) -> None:
        self._training, self._is_audited = training, is_audited
        share = training.settings.sdc.budget_of(training.dims.data)
        self.checks = CheckBudget(
            CheckPlan(Cadence(1), (), share, pace=_pace_of(training)), _Looks(training.engine.device)
        )
        self._agreement = StepAgreement(training.host_group)
        self.begin: list[Callable[[int], None]] = []
        self.checks.begin(training.step)

    def add(self, begin: Callable[[int], None]) -> None:
        """Call a function with the number of each step that begins, also with that of the running one."""
        self.begin.append(begin)
        begin(self._training.step)

    def restart(self) -> None:
        """Begin the next step again, since a checkpoint was loaded."""
        for begin in self.begin:
            begin(self._training.step)

    def after_step(self, step: int) -> None:
        """Agree on what the step before took, adjust how often steps look, and begin the next step.

        Collective: all ranks of the world.
        """
        self._agreement.start(self.checks.fields)
        self._agreement.finish()
        self.checks.end(self._training, step)
        following = self._training.step
        self.checks.begin(following, audits=self._is_audited(following))
        for begin in self.begin:
            begin(following)


def _pace_of(training: Training) -> AuditPace | None:
    """Pace of audits, each of which takes a micro-batch at least; None: their interval is given."""
    audit = training.settings.audit
    if not audit.enabled or audit.most_interval == audit.interval:
        return None
    times = 1 + audit.permutes(training.dims.data)
    return AuditPace(audit.interval, audit.most_interval, 0, times / int(training.engine.gradient_accumulation_steps()))
