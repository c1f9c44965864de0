"""Standstills of a run in its page: a table of all, and of the last ones each rank's state, its wait and the stacks."""

from __future__ import annotations

from collections.abc import Sequence

from megasdc.common.process_state import RUNNING
from megasdc.ops.health.incident_file import HangIncident, SharedStack
from megasdc.ops.run_folder.record import RunRecord
from megasdc.ops.run_folder.status import clock
from megasdc.output.page import Fold, Section
from megasdc.output.table import Cell, Table, few

DETAILED = 3
"""Maximum of standstills that are shown with states and stacks; a file holds the others."""


def hang_sections(run: RunRecord) -> list[Section]:
    """Sections on the standstills of a run; empty: there was none."""
    if not run.hangs:
        return []
    return [Section("Hangs", tables=[_hangs(run.hangs)]), *map(_details, run.hangs[: -DETAILED - 1 : -1])]


def _hangs(hangs: Sequence[HangIncident]) -> Table:
    rows = [
        (clock(one.time), one.step, one.kind, one.who, one.message, str(one.path)) for one in reversed(hangs)
    ]  # newest first
    older = len(hangs) - DETAILED
    note = f"States and stacks of the last {DETAILED} follow; the files hold those of all." if older > 0 else ""
    return Table("hangs", ("time", "step", "kind", "who", "what", "file"), rows, ("kind", "who"), note=note)


def _details(hang: HangIncident) -> Section:
    rows = [
        (
            Cell(str(one.rank), one.rank, look="bad" if one.rank in hang.ranks else ""),
            one.host,
            one.step,
            "-" if one.micro_batch < 0 else str(one.micro_batch),
            one.phase.label,
            one.stuck_s,
            Cell(one.process, look="" if one.process == RUNNING else "bad"),
            hang.waits.get(one.rank, "-"),
            one.where or "-",
        )
        for one in hang.states
    ]
    headings = ("rank", "host", "step", "micro-batch", "phase", "seconds in it", "process", "waits", "at")
    table = Table(f"states_{hang.run}", headings, rows, ("host", "phase", "process"))
    when = f"{clock(hang.time)}, by the clock of the host that wrote it"
    return Section(
        f"Hang in step {hang.step}: {hang.who}",
        sentences=[f"{hang.message[:1].upper()}{hang.message[1:]}.", f"Kind {hang.kind}, {when}. {_of_stacks(hang)}"],
        tables=[table],
        folds=[_fold(one) for one in hang.stacks],
    )


def _of_stacks(hang: HangIncident) -> str:
    if not hang.stacks:
        return "No rank told its stacks."
    return "Ranks with the same stack are shown together, below the table."


def _fold(stack: SharedStack) -> Fold:
    inner = stack.lines[-1].strip() if stack.lines else "empty"
    return Fold(f"{few(stack.threads, 6)}: {inner}", "\n".join(stack.lines))
