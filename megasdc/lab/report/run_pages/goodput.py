"""Goodput in the page of a supervised run: where its time went, attempt by attempt."""

from __future__ import annotations

from megasdc.lab.report.run_pages.figures.goodput import goodput_figures
from megasdc.ops.run_folder.status import clock
from megasdc.ops.supervise.diagnosis import KINDS
from megasdc.ops.supervise.goodput import AttemptTime, Goodput
from megasdc.output.page import Section
from megasdc.output.table import Cell, Table, few, number

_WELL = ("done", "stopped")


def goodput_section(goodput: Goodput) -> Section:
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
    return Section("Where the time went", sentences, tables=[_attempts(goodput)], figures=figures)


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
        number(one.seconds, ",.1f"),
        number(one.parts["productive"], ",.1f"),
        ended,
        one.text,
        one.decided,
    )
