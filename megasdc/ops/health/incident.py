"""What is known of a run that does not move, and the incident that is written of it.

Each agent makes a report of its own ranks. From those of all hosts the front, or each agent that shares the run folder
with the others, comes to the same conclusion and writes one incident.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import write_durably
from megasdc.common.errors import HangError, PeerError
from megasdc.ops.health.blame import GONE_KIND, find_blame
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.rank_state import GroupState, RankState
from megasdc.ops.health.record import Progress, WatchedIdentity

INCIDENT_FOLDER = "incidents"
STANDSTILL = "nothing moved for"
"""With which the message of each conclusion begins."""


def rank_state(
    identity: WatchedIdentity,
    progress: Progress,
    limit_s: float,
    process: str,
    answer: Mapping[str, Any],
    silent: Mapping[str, int],
) -> RankState:
    """State of a rank.

    Args:
        process: see ``megasdc.common.host``.
        answer: that it has given, see ``megasdc.ops.health.rank_watch``; empty: none.
        silent: see ``megasdc.ops.health.watched.silent_peers``.
    """
    return RankState(
        rank=identity.rank,
        host=identity.host,
        pp_rank=answer.get("pp_rank", identity.pp_rank),
        tp_rank=answer.get("tp_rank", identity.tp_rank),
        dp_rank=answer.get("dp_rank", identity.dp_rank),
        step=progress.step,
        micro_batch=progress.micro_batch,
        phase=progress.phase,
        stuck_s=time.monotonic() - progress.time,
        limit_s=limit_s,
        process=process,
        groups=_groups(answer.get("groups", {})),
        where=answer.get("where", ""),
        silent_peers=silent,
        group=progress.group,
        sequence=progress.sequence,
        may_wait=answer.get("may_wait", False),
    )


def read_state(raw: Mapping[str, Any]) -> RankState:
    """State of a rank, from a report."""
    return RankState(**{**raw, "phase": Phase(raw["phase"]), "groups": _groups(raw["groups"])})


def _groups(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, GroupState]:
    return {
        name: GroupState(
            tuple(one["ranks"]),
            one["joined"],
            one["ended"],
            {int(number): text for number, text in one["recent"].items()},
        )
        for name, one in raw.items()
    }


@dataclass(frozen=True)
class HangConclusion:
    """What follows from the reports of all hosts.

    Args:
        leave: ``exit_code`` and ``message`` with which ranks end.
        path: of the incident.
        incident: its content.
    """

    leave: Mapping[str, Any]
    path: Path
    incident: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The incident as JSON."""
        return json.dumps(self.incident, indent=2) + "\n"

    def write(self) -> None:
        """Write the incident.

        Raises:
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.path, self.text)


def conclude(
    health: Path, nodes: Sequence[str], reports: Sequence[Mapping[str, Any]], lost: Sequence[str]
) -> HangConclusion:
    """Name the cause of a standstill.

    Args:
        health: folder of the run.
        nodes: names of all hosts.
        reports: of hosts that are stuck, at least one (``WatchedRanks.report``).
        lost: hosts that were heard of, and are no more.
    """
    states = sorted((read_state(one) for report in reports for one in report["states"]), key=lambda one: one.rank)
    stacks = {rank: found for report in reports for rank, found in report["stacks"].items()}
    names = {address: one["host"] for report in reports for one in report["states"] for address in report["addresses"]}
    blame = find_blame(states, lost, names)
    message = f"{STANDSTILL} {min(one.stuck_s for one in states):.0f} s: {blame.text}"
    unseen = set(nodes) - {one.host for one in states} - set(lost)
    if unseen:
        message += f" (nothing is known of {', '.join(sorted(unseen))})"
    run = reports[0]["run"]
    incident = {
        "kind": f"hang/{blame.kind}",
        "run": run,
        "launch": reports[0].get("launch"),
        "time": time.time(),
        "message": message,
        "ranks": list(blame.ranks),
        "hosts": sorted({one.host for one in states if one.rank in blame.ranks}) or list(blame.hosts or lost),
        "waits": {str(rank): text for rank, text in blame.waits.items()},
        "states": [asdict(one) for one in states],
        "stacks": clustered(stacks),
        "devices": [one["devices"] for one in reports],
    }
    path = health / INCIDENT_FOLDER / f"hang_{run}.json"
    code = PeerError.exit_code if blame.kind == GONE_KIND else HangError.exit_code
    return HangConclusion({"exit_code": code, "message": f"{message}; see {path}"}, path, incident)


def clustered(stacks: Mapping[str, Mapping[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Equal stacks once, with the ranks and threads that have them; those of most ranks first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for rank, threads in stacks.items():
        for name, lines in threads.items():
            groups.setdefault(tuple(lines), []).append(f"rank {rank} {name.split()[0]}")
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [{"of": of, "stack": list(lines)} for lines, of in ordered]
