"""What a run has met, with what its supervisor did: hosts that were replaced or came back, and earlier saves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megasdc.launcher.verdict import REPLACED, RETURNED, REWOUND, Met, drain, in_order, read_met
from megasdc.supervisor.diagnosis import KINDS, MENDABLE, Back
from megasdc.supervisor.history import SUSPECTED, TESTED
from megasdc.supervisor.journal import FOLDER, Entry, read_journal
from megasdc.supervisor.policy import Action


def all_met(run_dir: Path) -> list[Met]:
    """What a run has met in all of its starts, oldest first.

    Raises:
        StorageError: the journal was changed, or cannot be read.
    """
    return with_journal(run_dir, read_journal(run_dir / FOLDER))


def with_journal(run_dir: Path, entries: Sequence[Entry]) -> list[Met]:
    """What a run has met, by the entries of its journal and what its ranks and agents have reported."""
    launches = [str(one.fields["launch_id"]) for one in entries if one.kind == "planned"]
    return in_order([*read_met(run_dir), *of_journal(entries)], launches)


def of_journal(entries: Sequence[Entry]) -> list[Met]:
    """What a supervisor did that is no start as usual.

    Args:
        entries: of its journal, oldest first.
    """
    found: list[Met] = []
    attempt, launch, step, kind, away = 0, None, 0, "", set[str]()
    for entry in entries:
        said, time = entry.fields, datetime.fromtimestamp(entry.time, UTC).isoformat(timespec="seconds")
        common: dict[str, Any] = {"attempt": attempt, "step": step, "time": time, "launch": launch}
        if entry.kind == "planned":
            attempt, launch, step = int(said["attempt"]), str(said["launch_id"]), 0
        elif entry.kind == "ended":
            step, kind = int(said["diagnosis"].get("step") or 0), str(said["diagnosis"]["kind"])
        elif entry.kind == SUSPECTED:
            away |= said["hosts"].keys()
            found += [_replaced(common, (host,), text, "") for host, text in said["hosts"].items()]
        elif entry.kind == "decided":
            if hosts := tuple(said.get("replaced", ())):
                away |= set(hosts)
                found.append(_replaced(common, hosts, said["text"], kind))
            if kind == "corrupt" and said["action"] != Action.STOP.value:
                done = "the run goes on from an earlier save"
                found.append(Met(**common, kind=REWOUND, what=said["text"], hosts=(), done=done))
            if said.get("back") is not None:
                back = Back(**said["back"])
                found.append(Met(**common, kind=REWOUND, what=said["text"], hosts=(), done=f"the run goes {back}"))
        elif entry.kind == TESTED and said["exit_code"] == 0 and said["host"] in away:
            away.remove(said["host"])
            what, hosts = f"{said['host']} was tested: {said['text']}", (said["host"],)
            found.append(Met(**common, kind=RETURNED, what=what, hosts=hosts, done="it is a spare again"))
    return found


def _replaced(common: dict[str, Any], hosts: tuple[str, ...], text: str, kind: str) -> Met:
    title = KINDS[kind].title if kind in KINDS else "failed often in other runs"
    names = " and ".join(hosts)
    to_do = f"mend what {names} lacks" if kind in MENDABLE else drain(names)
    return Met(**common, kind=REPLACED, what=f"{names}: {title}", hosts=hosts, done=text, to_do=to_do)
