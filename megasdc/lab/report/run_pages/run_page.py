"""Page of one run: progress, metrics, events, configuration.

Goodput in the page of a supervised run: where its time went, attempt by attempt.

Standstills of a run in its page: a table of all, and of the last ones each rank's state, its wait and the stacks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megasdc.common.errors import StorageError
from megasdc.common.host import RUNNING
from megasdc.common.words import clock, few
from megasdc.lab.report.run_pages.drops import Drops, load_drops
from megasdc.lab.report.run_pages.facts import highlights, places, run_versions
from megasdc.lab.report.run_pages.figures.drops import drop_figures
from megasdc.lab.report.run_pages.figures.goodput import goodput_figures
from megasdc.lab.report.run_pages.figures.rounds import round_figures
from megasdc.lab.report.run_pages.figures.run import run_figures
from megasdc.ops.health.incident_file import HangIncident, SharedStack
from megasdc.ops.launch.launch_verdict import WRONG, read_met
from megasdc.ops.run_folder.marks import (
    FAULT,
    FINDING,
    HANG,
    INCIDENT,
    NOT_FINITE,
    SAVE,
    SKIP,
    EventMark,
    counts_of,
    event_rows,
    marks_of,
)
from megasdc.ops.run_folder.record import RunRecord
from megasdc.ops.run_folder.replicas import RoundsSummary, load_rounds, summarize_rounds
from megasdc.ops.run_folder.status import RunStatus, status_of
from megasdc.ops.supervise.diagnosis import KINDS
from megasdc.ops.supervise.goodput import AttemptTime, Goodput, goodput_of
from megasdc.ops.supervise.met import all_met
from megasdc.output.page import Cell, Fold, Page, PageSection, State, Table, number_cell, plain_values, table_of
from megasdc.sdc.incident import headline

_WELL = ("done", "stopped")


def goodput_section(goodput: Goodput) -> PageSection:
    """The section of a run that was supervised."""
    count = len(goodput.attempts)
    sentences = [
        f"Effective training time ratio {goodput.effective_ratio:.1%}: {goodput.parts['productive']:,.0f} s of "
        f"{goodput.wall_s:,.0f} s, in {count:,} attempt{'s' if count > 1 else ''}, went into steps that were not taken "
        "again."
    ]
    if goodput.unreported_s:
        sentences.append(f"Of these, {goodput.unreported_s:,.0f} s are since the last line: no step is reported yet.")
    figures = goodput_figures(goodput) if goodput.wall_s else []
    return PageSection("Where the time went", sentences, tables=[_attempts(goodput)], figures=figures)


def _attempts(goodput: Goodput) -> Table:
    headings = ("attempt", "began", "hosts", "steps", "seconds", "productive", "ended", "why", "then")
    return Table("attempts", headings, [_row(one) for one in goodput.attempts], ("ended", "then"))


def _row(one: AttemptTime) -> tuple[object, ...]:
    steps = Cell("none") if one.last is None or one.resumed is None else Cell(f"{one.resumed + 1:,} to {one.last:,}")
    ended = Cell("it runs")
    if one.ended is not None:
        ended = Cell(KINDS[one.ended].title, look="good" if one.ended in _WELL else "bad")
    return (
        one.number,
        clock(one.planned_at),
        few(one.hosts, 8),
        steps,
        number_cell(one.seconds, ",.1f"),
        number_cell(one.parts["productive"], ",.1f"),
        ended,
        one.text,
        one.decided,
    )


DETAILED = 3
"""Maximum of standstills that are shown with states and stacks; a file holds the others."""


def rounds_section(folder: Path, summary: RoundsSummary, runs: Mapping[str, RunRecord]) -> list[PageSection]:
    """The section of rounds of Local-SGD; empty: none was made.

    Args:
        folder: of the launch of replicas.
        runs: of replicas that are shown, by name.
    """
    rounds = load_rounds(folder, [])
    if not rounds:
        return []
    columns: dict[str, Any] = {
        "replica": "replica",
        "from round": "first",
        "to round": "last",
        "why": lambda one: Cell(one.kind, look="bad" if one.kind == WRONG else ""),
        "what": "reason",
        "took part again in round": lambda one: number_cell(one.returned, ",d", missing="not yet"),
    }
    table = table_of("left_out", summary.left_out, columns, filters=("replica", "why"), title="Replicas left out")
    told = [f"Rounds {summary.rounds:,}, of {summary.replicas} replicas, every {summary.every or '?'} steps."]
    if summary.drop_share:
        told.append(f"{summary.drop_share:.1%} of the micro-batches of rounds were dropped by DropCompute.")
    if not summary.left_out:
        told.append("No replica was left out.")
    told += [f"Note: {one}." for one in summary.notes]
    figures = round_figures(rounds, summary.every or 1, runs)
    return [PageSection("Rounds", told, tables=[table] if summary.left_out else [], figures=figures)]


def _rounds(run: RunRecord) -> list[PageSection]:
    """Rounds of which a run is a replica."""
    folder = run.path.resolve().parent
    summary = summarize_rounds(run.path) if run.setting("megasdc.local_sgd.replicas") else None
    name = f"replica {run.setting('megasdc.local_sgd.replica')}"
    return [] if summary is None else rounds_section(folder, summary, {name: run})


def hang_sections(run: RunRecord) -> list[PageSection]:
    """Sections on the standstills of a run; empty: there was none."""
    if not run.hangs:
        return []
    return [PageSection("Hangs", tables=[_hangs(run.hangs)]), *map(_details, run.hangs[: -DETAILED - 1 : -1])]


def _hangs(hangs: Sequence[HangIncident]) -> Table:
    rows = [
        (clock(one.time), one.step, one.kind, one.who, one.message, str(one.path)) for one in reversed(hangs)
    ]  # newest first
    older = len(hangs) - DETAILED
    note = f"States and stacks of the last {DETAILED} follow; the files hold those of all." if older > 0 else ""
    return Table("hangs", ("time", "step", "kind", "who", "what", "file"), rows, ("kind", "who"), note=note)


def _details(hang: HangIncident) -> PageSection:
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
    return PageSection(
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


_COUNTED = (INCIDENT, HANG, FINDING, NOT_FINITE, SKIP, FAULT, SAVE)
"""Marks that are counted at the top of the page where there are any; incidents and findings always."""


def run_page(run: RunRecord, out: Path, now: float, title: str | None = None) -> Page:
    """The page of a run; ``out``: its path, for relative links; ``now`` in seconds since the epoch."""
    status, marks = status_of(run), marks_of(run)
    counts = counts_of(marks)
    drops = load_drops(run)
    notes = list(run.notes)
    goodput = _goodput(run, now, notes)
    figures = run_figures(run, marks)
    sections = [
        PageSection("Incidents", tables=[incidents_table(run, out)]) if run.incidents else None,
        *hang_sections(run),
        _met(run, notes),
        None if goodput is None else goodput_section(goodput),
        *_rounds(run),
        PageSection("Over the steps", figures=figures) if figures else None,
        _drops_section(drops),
        PageSection("Configuration", facts=highlights(run)),
        PageSection("Where and with what", facts=places(run) | _versions(run)),
        PageSection("Events", _few_events(run), tables=[_events(run)]),
    ]
    return Page(
        kind="run",
        title=title or f"Run {run.name}",
        verdict=f"{title or 'Run ' + run.name}: {_with_counts(status.text, counts, INCIDENT, HANG)}",
        state=line_state(status, counts),
        sentences=[f"Run folder {run.path}."],
        tiles=_tiles(run, status, counts, goodput),
        notes=notes,
        sections=[one for one in sections if one is not None and _says_something(one)],
        summary={
            **summary_of(run, status, marks),
            "notes": notes,
            "goodput": None if goodput is None else asdict(goodput),
        },
    )


def _goodput(run: RunRecord, now: float, notes: list[str]) -> Goodput | None:
    """That of a supervised run; None: it was not, or its journal cannot be used, which is noted."""
    try:
        return goodput_of(run.path, now)
    except StorageError as error:
        notes.append(f"where the time went is not shown: {error}")
        return None


def _met(run: RunRecord, notes: list[str]) -> PageSection | None:
    """What the run has met in all of its starts; None: nothing, or the journal cannot be used, which is noted."""
    try:
        found = all_met(run.path)
    except StorageError as error:
        notes.append(f"what a supervisor did is not shown: {error}")
        found = read_met(run.path)
    columns: dict[str, Any] = {
        **{name: name for name in ("attempt", "step", "kind")},
        "hosts": lambda one: ", ".join(one.hosts),
        "ranks": lambda one: ", ".join(map(str, one.ranks)),
        "what": "what",
        "then": "done",
        "to do": "to_do",
        "time": "time",
    }
    return (
        PageSection("What the run met", tables=[table_of("met", found, columns, filters=("kind",))]) if found else None
    )


def _with_counts(text: str, counts: dict[str, int], *lanes: str) -> str:
    told = [f"{counts[one]:,} {one}{'' if counts[one] == 1 else 's'}." for one in lanes if one in counts]
    return " ".join([text if text.endswith(".") or not told else f"{text}.", *told])


def line_state(status: RunStatus, counts: dict[str, int]) -> State:
    """Colour of a run's first line."""
    if status.state == "failed" or counts.get(INCIDENT):
        return "different"
    return "same" if status.state == "done" else "unsure"


def _says_something(section: PageSection) -> bool:
    return bool(section.facts or section.figures or section.sentences or any(one.rows for one in section.tables))


def _tiles(run: RunRecord, status: RunStatus, counts: dict[str, int], goodput: Goodput | None) -> dict[str, str]:
    found = {"step": f"{status.step:,}" + (f" of {status.planned:,}" if status.planned else "")}
    if goodput is not None:
        found["effective training time"] = f"{goodput.effective_ratio:.1%}"
    for label, name, form in (
        ("training loss", "train/loss", ".4f"),
        ("evaluation loss", "eval/loss", ".4f"),
        ("tokens per second", "speed/tokens_per_s", ",.0f"),
        ("tokens used", "train/tokens", ",.0f"),
    ):
        if name in run.series:
            found[label] = number_cell(float(run.series[name].values[-1]), form).text
    found |= {f"{lane}s": "0" for lane in (INCIDENT, FINDING)}
    found |= {_plural(lane): f"{counts[lane]:,}" for lane in _COUNTED if lane in counts}
    return found


def _plural(lane: str) -> str:
    return {FAULT: "faults injected", NOT_FINITE: "not finite"}.get(lane, f"{lane}s")


def incidents_table(run: RunRecord, out: Path) -> Table:
    """Incidents of a run, with links to their pages; ``out``: path of the page that has the table."""
    rows = []
    for page, one in run.incidents:
        link = quote(os.path.relpath(page.resolve(), out.resolve().parent)) if page.exists() else ""
        rows.append(
            (
                one.step,
                "-" if one.micro_batch is None else str(one.micro_batch),
                one.tier,
                one.verdict.replace("_", " "),
                ", ".join(f"{suspect.rank} on {suspect.host}" for suspect in one.suspects),
                one.done,
                headline(one),
                Cell("page" if link else "its page is missing", link=link, look="" if link else "bad"),
            )
        )
    headings = ("step", "micro-batch", "found by", "verdict", "rank", "then", "what", "report")
    return Table("incidents", headings, rows, ("found by", "verdict"))


def _drops_section(drops: Drops | str | None) -> PageSection | None:
    if drops is None:
        return None
    if isinstance(drops, str):
        return PageSection("DropCompute", [f"The recorded step times cannot be shown: {drops}."])
    notes = [f"Note: {note}." for note in drops.notes]
    advice = "`megasdc dropcompute times` says who was late and why, `megasdc dropcompute threshold` has the numbers."
    return PageSection("DropCompute", [*notes, advice], figures=drop_figures(drops))


def _versions(run: RunRecord) -> dict[str, str]:
    found = run_versions(run)
    return {"versions": ", ".join(f"{name} {version}" for name, version in found.items())} if found else {}


def _few_events(run: RunRecord) -> list[str]:
    ranks = len({one.rank for one in run.events})
    if not run.events:
        return []
    return [
        f"{len(run.events):,} events of {ranks:,} rank{'s' if ranks > 1 else ''}; those of one kind, step and rank are "
        "one row, with the fields of the first. Events that make no mark in the figures have no mark here."
    ]


def _events(run: RunRecord) -> Table:
    rows = sorted(event_rows(run.events), key=lambda one: (not one.lane, one.time, one.step or 0))
    columns: dict[str, Any] = {
        "step": lambda one: number_cell(one.step, ",d", missing=""),
        "mark": "lane",
        "event": "what",
        "times": "count",
        **{name: name for name in ("rank", "host", "time")},
        "fields": "details",
    }
    return table_of("events", rows, columns, filters=("mark", "event"))


def summary_of(run: RunRecord, status: RunStatus, marks: Sequence[EventMark]) -> dict[str, object]:
    """A run as plain values."""
    last = {name: float(run.series[name].values[-1]) for name in ("train/loss", "eval/loss") if name in run.series}
    return plain_values(
        {
            "run": str(run.path),
            "state": status.state,
            "text": status.text,
            "step": status.step,
            "planned_steps": status.planned,
            "loss": last.get("train/loss"),
            "eval_loss": last.get("eval/loss"),
            "marks": counts_of(marks),
            "incidents": [str(page) for page, _ in run.incidents],
            "hangs": [str(one.path) for one in run.hangs],
            "notes": list(run.notes),
        }
    )
