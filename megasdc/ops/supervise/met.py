"""What a run has met, with what its supervisor did: hosts that were replaced, failed or came back; earlier saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megasdc.ops.launch.launch_verdict import REPLACED, RETURNED, REWOUND, Met, drain, order_by_step, read_met
from megasdc.ops.supervise.diagnosis import KINDS, MENDABLE, RewindTarget
from megasdc.ops.supervise.history import SUSPECTED, TESTED
from megasdc.ops.supervise.host_tests import HostTest
from megasdc.ops.supervise.journal import FOLDER, JournalEntry, read_journal
from megasdc.ops.supervise.policy import Action


def all_met(run_dir: Path) -> list[Met]:
    """What a run has met in all of its starts, oldest first.

    Raises:
        StorageError: the journal was changed, or cannot be read.
    """
    return with_journal(run_dir, read_journal(run_dir / FOLDER))


def with_journal(run_dir: Path, entries: Sequence[JournalEntry]) -> list[Met]:
    """What a run has met, by the entries of its journal and what its ranks and agents have reported."""
    launches = [str(one.fields["launch_id"]) for one in entries if one.kind == "planned"]
    return order_by_step([*read_met(run_dir), *of_journal(entries)], launches)


def of_journal(entries: Sequence[JournalEntry]) -> list[Met]:
    """What a supervisor did that is no start as usual.

    Args:
        entries: of its journal, oldest first.
    """
    return [one for _, some in by_entry(entries) for one in some]


def by_entry(entries: Sequence[JournalEntry]) -> Iterator[tuple[JournalEntry, list[Met]]]:
    """Each entry of a journal, with what it tells of ``of_journal``."""
    attempt, launch, step, kind, away = 0, None, 0, "", set[str]()
    for entry in entries:
        said, time = entry.fields, datetime.fromtimestamp(entry.time, UTC).isoformat(timespec="seconds")
        common: dict[str, Any] = {"attempt": attempt, "step": step, "time": time, "launch": launch}
        found = list[Met]()
        if entry.kind == "planned":
            attempt, launch, step = int(said["attempt"]), str(said["launch_id"]), 0
        elif entry.kind == "ended":
            step, kind = int(said["diagnosis"].get("step") or 0), str(said["diagnosis"]["kind"])
        elif entry.kind == SUSPECTED:
            away |= said["hosts"].keys()
            found += [_replaced(common, (host,), text, "") for host, text in said["hosts"].items()]
        elif entry.kind == "decided":
            away |= set(said.get("replaced", ()))
            found += _of_decision(common, said, kind)
        elif entry.kind == TESTED:
            found += _of_test(common, said, away)
        yield entry, found


def entry_name(entry: JournalEntry, some: Sequence[Met]) -> str:
    """Name of what an entry tells, at least one, which a journal that is written anew does not change.

    A decision may be made again then; it is that of its attempt.
    """
    if entry.kind == "decided":
        return f"decision_{some[0].attempt:04d}_{some[0].launch}"
    return f"{entry.kind}_{round(1e6 * entry.time)}"


def _of_decision(common: dict[str, Any], said: Mapping[str, Any], kind: str) -> Iterator[Met]:
    """``kind``: of the diagnosis."""
    if hosts := tuple(said.get("replaced", ())):
        yield _replaced(common, hosts, said["text"], kind)
    if kind == "corrupt" and said["action"] != Action.STOP.value:
        done = "the run goes on from an earlier save"
        yield Met(**common, kind=REWOUND, what=said["text"], hosts=(), done=done)
    if said.get("back") is not None:
        back = RewindTarget(**said["back"])
        yield Met(**common, kind=REWOUND, what=said["text"], hosts=(), done=f"the run goes {back}")


def _of_test(common: dict[str, Any], said: Mapping[str, Any], away: set[str]) -> Iterator[Met]:
    """A host that is used no more, or again; ``away``, those that are not used, is changed."""
    test = HostTest(**{name: said[name] for name in ("host", "exit_code", "text")})
    what = f"{test.host} was tested: {test.text}"
    if test.passed and test.host in away:
        away.remove(test.host)
        yield Met(**common, kind=RETURNED, what=what, hosts=(test.host,), done="it is a spare again")
    elif not test.passed and test.host not in away:
        away.add(test.host)
        to_do = drain(test.host) if test.is_conclusive else f"look at {test.host}; it is tested again"
        done = "it is not used as a spare"
        yield Met(**common, kind=REPLACED, what=what, hosts=(test.host,), done=done, to_do=to_do)


def _replaced(common: dict[str, Any], hosts: tuple[str, ...], text: str, kind: str) -> Met:
    title = KINDS[kind].title if kind in KINDS else "failed often in other runs"
    names = " and ".join(hosts)
    to_do = f"mend what {names} lacks" if kind in MENDABLE else drain(names)
    if kind == "mended":  # it lacks nothing that a check finds
        to_do = f"look at {names}, test with `megasdc stress`"
    return Met(**common, kind=REPLACED, what=f"{names}: {title}", hosts=hosts, done=text, to_do=to_do)
