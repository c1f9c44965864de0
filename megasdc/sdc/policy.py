"""Consequences of a finding by policy: the action, events of its rulings, and the incident with its alert.

The action itself is the host's: a run of our own may repair the step or isolate a replica, every host may halt.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megasdc.common.errors import StorageError
from megasdc.common.origin import this_launch
from megasdc.common.user_code import alert
from megasdc.config.detection import PolicySection
from megasdc.events import read_events
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.finding import DONE, LEAVE_OUT, Finding, Suspects, describe_ruling
from megasdc.sdc.host import Host
from megasdc.sdc.incident import Incident, IncidentEvidence, RankPlace
from megasdc.sdc.incident_page import write_incident

logger = logging.getLogger(__name__)

SHOWN_EVENTS = 20
SHOWN_GAPS = 5

Describe = Callable[[list[str]], Mapping[str, Any]]
"""Returns fields of an incident that the host alone knows, by name; called on rank 0. To its argument it adds a
sentence for each file of the run that cannot be read."""


def choose_action(policy: PolicySection, found: Finding) -> str:
    """The most severe action of a policy for the verdicts of a finding."""
    return max((getattr(policy, ruling.verdict) for ruling in found.rulings), key=list(DONE).index)


def report_finding(
    host: Host,
    suspects: Suspects,
    step: int,
    found: Finding,
    action: str,
    describe: Describe,
    alert_command: Sequence[str],
) -> str | None:
    """Report a finding, also to the suspects: an event for each ruling, and the incident, for which an alert is sent.

    Args:
        action: action that follows, one of the keys of ``DONE``, or ``LEAVE_OUT``.
        alert_command: see ``megasdc.common.user_code``.

    Returns:
        Path of the incident's page, on all ranks; None: it could not be written, which was logged.

    Collective: all ranks of the world. They wait for the alert, so that a launch does not end before it is sent.
    """
    for ruling in found.rulings:
        described = describe_ruling(ruling)
        host.events.emit_on_rank_0("sdc", "verdict", step=step, tier=found.tier, action=action, **described)
    suspects.add(ruling.rank for ruling in found.rulings if ruling.rank is not None)
    page = None
    if host.dims.rank == 0:
        try:
            data, path = write_incident(_incident(host, suspects.places, step, found, action, describe))
            page = str(path)
            if problem := alert(alert_command, data, data.read_text()):
                logger.warning("%s", problem)
                host.events.emit("health", "alert_failed", step=step, problem=problem)
        except StorageError as error:
            logger.error("%s", error)
        except Exception:  # any error in the evidence: the other ranks wait in the gather below
            logger.exception("the incident of step %d cannot be reported", step)
    return gather_objects(page, host.host_group)[0]


def _incident(
    host: Host, ranks: Sequence[RankPlace], step: int, found: Finding, action: str, describe: Describe
) -> Incident:
    gaps: list[str] = []
    earlier = tuple(read_events(host.folder, kind="sdc", broken=gaps))[-SHOWN_EVENTS:]
    fields = describe(gaps)
    if len(gaps) > SHOWN_GAPS:
        gaps[SHOWN_GAPS:] = [f"and {len(gaps) - SHOWN_GAPS} more"]
    return Incident(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run_dir=str(host.folder),
        step=step,
        micro_batch=found.micro_batch,
        tier=found.tier,  # type: ignore[arg-type]
        verdict=found.worst.verdict,  # type: ignore[arg-type]
        basis=found.worst.basis,  # type: ignore[arg-type]
        policy=action,  # type: ignore[arg-type]
        done={**DONE, LEAVE_OUT: "left out"}[action],  # type: ignore[arg-type]
        flagged=found.flagged(ranks, step),
        disputed=found.disputed(ranks, step),
        ranks=tuple(ranks),
        evidence=IncidentEvidence(found.compared, found.differing),
        opinions=found.opinions,
        earlier=earlier,
        not_read=tuple(gaps),
        launch=this_launch(),
        attempt=host.events.origin.attempt,
        round=found.round,
        **fields,
    )


def what_to_do(page: str | None) -> str:
    """Sentence that names the page of an incident; None: it could not be written."""
    return f"What to do: {page}" if page else "The incident report could not be written"
