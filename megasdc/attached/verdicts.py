"""What follows from a finding in a guarded training: events, the incident report, and the end of the training."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megasdc.attached.engine import precision_of
from megasdc.attached.saves import SaveMarks
from megasdc.attached.training import Training
from megasdc.checkpoint.manifest import installed_versions
from megasdc.common.errors import CorruptionError, StorageError
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.device import gather_places
from megasdc.sdc.incidents.incident import Environment, Script
from megasdc.sdc.incidents.page import write_incident
from megasdc.sdc.incidents.settled import Settled, describe

logger = logging.getLogger(__name__)

SEVERITY = ("warn", "halt")


class CorruptionExit(CorruptionError, SystemExit):
    """Silent data corruption in a guarded training; where nobody catches it the process ends with its exit code."""

    @property
    def code(self) -> int:  # type: ignore[override]
        """Exit code of the process."""
        return self.exit_code


class Verdicts:
    """Acts on findings as the policy says.

    Args:
        saves: knows which checkpoints may be trusted.

    Collective: all ranks of the world.
    """

    def __init__(self, training: Training, saves: SaveMarks) -> None:
        self._training, self._saves = training, saves
        self._ranks = gather_places(training.engine.device, training.dims, training.world)
        self._agreed: int | None = None

    def agreed(self, step: int) -> None:
        """All ranks have agreed in an audit of a step."""
        self._agreed = step
        self._saves.agreed(step)

    def act(self, step: int, found: Settled) -> None:
        """Report a finding, and end the training if its policy is to halt.

        Raises:
            CorruptionExit: it is; on all ranks.

        Collective: all ranks of the world.
        """
        training, policy = self._training, self._training.settings.sdc.policy
        action = max((getattr(policy, one.verdict) for one in found.rulings), key=SEVERITY.index)
        for ruling in found.rulings:
            training.tell("sdc", "verdict", step=step, tier=found.tier, action=action, **describe(ruling))
        training.suspects.add(one.rank for one in found.rulings if one.rank is not None)
        is_first = training.dims.rank == 0
        page = gather_objects(self._report(step, found, action) if is_first else None, training.world)[0]
        what = "golden trace" if found.tier == "golden" else "audit"
        text = f"the {what} of step {step} found silent data corruption: {found.text}. " + (
            f"What to do: {page}" if page else "The incident report could not be written"
        )
        if is_first:
            logger.error("%s; %s", text, "the step is not taken" if action == "halt" else "training goes on")
        if action == "halt":
            training.tell("end", "failed", step=step, exit_code=CorruptionExit.exit_code, message=text)
            raise CorruptionExit(text)

    def _report(self, step: int, found: Settled, action: str) -> str | None:
        training = self._training
        try:
            incident = found.incident(
                *(training.folder, step, action, self._ranks),
                environment=Environment(installed_versions(), training.dims.layout, precision_of(training.engine)),
                verified_checkpoint=_text(self._saves.verified),
                newest_candidate=_text(self._saves.candidate),
                script=Script(_command(sys.argv), self._agreed),
                attempt=training.origin.attempt,
            )
            return str(write_incident(incident)[1])
        except StorageError as error:
            logger.error("%s", error)
        except Exception:  # any error in the evidence: the other ranks wait for the page
            logger.exception("the incident of step %d cannot be reported", step)
        return None


def _command(words: Sequence[str]) -> str:
    """A command line without what the launcher has added on this rank."""
    return shlex.join(word for word in words if not word.startswith(("--local_rank=", "--local-rank=")))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
