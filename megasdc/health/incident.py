"""What is known of a run that does not move, and the incident that is written of it.

An agent writes a report of its own ranks; all agents that share a run folder read each other's and write one incident.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasdc.durable import write_durably
from megasdc.health.blame import Blame, GroupState, RankState
from megasdc.health.phases import Phase
from megasdc.health.record import Identity, Progress

INCIDENT_FOLDER = "incidents"


def state_of(identity: Identity, progress: Progress, process: str, answer: Mapping[str, Any]) -> RankState:
    """State of a rank, from its record, its process, and its answer (``megasdc.health.rank_watch``); empty: none."""
    return RankState(
        rank=identity.rank,
        host=identity.host,
        pp_rank=identity.pp_rank,
        tp_rank=identity.tp_rank,
        dp_rank=identity.dp_rank,
        step=progress.step,
        micro_batch=progress.micro_batch,
        phase=progress.phase,
        stuck_s=time.monotonic() - progress.time,
        process=process,
        groups=_groups(answer.get("groups", {})),
        where=answer.get("where", ""),
    )


def read_state(raw: Mapping[str, Any]) -> RankState:
    """State of a rank, from a report."""
    return RankState(**{**raw, "phase": Phase(raw["phase"]), "groups": _groups(raw["groups"])})


def _groups(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, GroupState]:
    return {
        name: GroupState(one["joined"], one["ended"], {int(number): text for number, text in one["recent"].items()})
        for name, one in raw.items()
    }


def write_incident(
    health: Path,
    run: str,
    message: str,
    blame: Blame,
    states: Sequence[RankState],
    hosts: Sequence[str],
    stacks: Mapping[str, Mapping[str, Sequence[str]]],
    devices: Sequence[Mapping[str, Any]],
) -> Path:
    """Write the incident of a run; all agents of a shared folder write the same one, under one name.

    Args:
        health: folder of the run.
        run: name of this start.
        hosts: that are the cause.
        stacks: by rank and thread.
        devices: of each host that is known, what telemetry had read before.
    """
    folder = health / INCIDENT_FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"hang_{run}.json"
    content = {
        "kind": f"hang/{blame.kind}",
        "run": run,
        "time": time.time(),
        "message": message,
        "ranks": list(blame.ranks),
        "hosts": list(hosts),
        "waits": {str(rank): text for rank, text in blame.waits.items()},
        "states": [asdict(one) for one in states],
        "stacks": clustered(stacks),
        "devices": list(devices),
    }
    write_durably(path, json.dumps(content, indent=2) + "\n")
    return path


def clustered(stacks: Mapping[str, Mapping[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Equal stacks once, with the ranks and threads that have them; those of most ranks first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for rank, threads in stacks.items():
        for name, lines in threads.items():
            groups.setdefault(tuple(lines), []).append(f"rank {rank} {name.split()[0]}")
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [{"of": of, "stack": list(lines)} for lines, of in ordered]
