"""A view of a run as it stands on a terminal, by rich: as many rows as fit, and the number of those that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megasdc.common.host import RUNNING
from megasdc.common.words import duration
from megasdc.ops.health.hosts import HostPosition, RankPosition
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.shared_folder_heartbeat import LOST_S
from megasdc.ops.run_folder.replicas import RoundsSummary, last_round
from megasdc.ops.top.view import RunView

FIT = "fit"
"""Verdict of a device that nothing is wrong with."""
SHOWN_MET = 3
"""The last things that the run has met, beside the newest incident."""
OLD_S = 3.0
"""An older description of a host is shown with its age."""
_STATES = {"running": "green", "done": "green", "starting": "bold", "stopped": "bold", "silent": "yellow"}
_INCIDENTS = {"sdc": ("case of corruption", "cases of corruption"), "hang": ("hang", "hangs")}
_HOW_TO_WATCH = (
    "Ranks are not watched: start the run with megasdc.health.enabled=true to see what each is doing, and to have a "
    "run that is stuck named and ended."
)
_HOW_TO_WATCH_GUARDED = (
    "Ranks are not watched: launch the training with `megasdc run -- deepspeed ...` to see what each is doing, and to "
    "have a run that is stuck named and ended."
)
_HEADINGS = ("host", "rank", "step", "micro", "phase", "for", "process", "")
_NUMBERS = {"rank", "step", "micro", "for", "ranks"}


class Screen:
    """A view of a run.

    Args:
        height: lines that it may have; None: any number.
    """

    def __init__(self, view: RunView, height: int | None = None) -> None:
        self._view, self._height = view, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Head and foot as they are; between them as many rows as there is room for."""
        head, foot = _head(self._view, options.max_width), _foot(self._view)
        events = [_line(f"  {one}") for one in self._view.events]
        room = None
        if self._height is not None:
            taken = sum(len(console.render_lines(one, options.update(height=None))) for one in (*head, *foot))
            room = self._height - taken - 2  # headings, and a line that stays empty
            ranks = sum(len(host.ranks) for host in _all_hosts(self._view))
            events = events[max(0, len(events) - max(0, room - ranks)) :]
            room -= len(events)
        hosts = _replicas(self._view, room) if self._view.of_replicas else _hosts(self._view, room)
        yield Group(*head, *hosts, *foot, *events)


def _all_hosts(view: RunView) -> list[HostPosition]:
    return [host for one in (view, *view.of_replicas) for host in one.hosts]


def _replicas(view: RunView, room: int | None) -> list[RenderableType]:
    """Each replica of Local-SGD: a line, and its hosts, with an equal share of the rows."""
    share = None if room is None else max(2, room // len(view.of_replicas) - 2)
    lines: list[RenderableType] = []
    for one in view.of_replicas:
        numbers = "   ".join(_numbers(one))
        lines.append(_line(f"{one.run_dir}  {one.text}   {numbers}", _STATES.get(one.state, "bold red")))
        lines += _hosts(one, share)
        lines += [_slow_line(slow) for slow in one.slow]
    return lines


def _slow_line(one: Mapping[str, Any]) -> RenderableType:
    who = f"{one['host']}, ranks {', '.join(map(str, one['ranks']))}"
    ratio, since = one["ratio"], one["since_step"]
    return _line(f"slow: {who}: {ratio:.2f} times as long as their peers, since step {since}", "yellow")


def _head(view: RunView, width: int) -> list[RenderableType]:
    style = _STATES.get(view.state, "bold red")
    lines: list[RenderableType] = [Text.assemble((view.run_dir, "bold"), "  ", (view.text, style))]
    if view.planned:
        bar = ProgressBar(total=view.planned, completed=view.step, width=max(10, min(40, width - 30)))
        row = Table.grid(padding=(0, 2))
        left = "" if view.eta_s is None else f"left {duration(view.eta_s)}"
        row.add_row(bar, f"{view.step / view.planned:.0%}", left)
        lines.append(row)
    lines.append(Text("   ".join(_numbers(view)) or "no metrics yet"))
    return [*lines, Text("")]


def _numbers(view: RunView) -> Iterable[str]:
    for value, text in (
        (view.loss, "loss {:.4f}"),
        (view.eval_loss, "evaluation {:.4f}"),
        (view.step_s, "{:.3g} s/step"),
        (view.tokens_per_s, "{:,.0f} tokens/s"),
        (view.effective_ratio, "effective time {:.1%}"),
    ):
        if value is not None:
            yield text.format(value)
    if view.quiet_s is not None and view.quiet_s > OLD_S and not view.over:
        yield f"written {duration(view.quiet_s)} ago"


def _hosts(view: RunView, room: int | None) -> list[RenderableType]:
    """A row a rank where they fit, else a row a host, those to look at first; and what is not shown."""
    if not view.hosts:
        how = _HOW_TO_WATCH if view.guard is None else _HOW_TO_WATCH_GUARDED
        return [Text("no agent has written yet") if view.health else Text(how, style="yellow")]
    rows = [row for host in view.hosts for row in _rank_rows(view, host)]
    if room is None or len(rows) <= room:
        return [_table(_HEADINGS, rows)]
    ordered = sorted(view.hosts, key=lambda host: _concern(view, host), reverse=True)
    fitting = max(1, room - 1)  # a line says what is not shown
    shown = ordered if len(ordered) <= fitting else ordered[: max(1, fitting - 1)]
    headings = ("host", "ranks", "step", "of each process", "rank", "phase", "for", "")
    ranks = sum(len(host.ranks) for host in view.hosts)
    note = f"{ranks:,} ranks do not fit: of each host the one that is longest in its phase; --once shows all"
    table = _table(headings, [_host_row(view, host) for host in shown])
    if len(shown) < len(ordered):
        left = ordered[len(shown) :]
        states = ", ".join(f"{count} {state}" for state, count in Counter(one.state for one in left).items())
        return [table, Text(f"{len(left)} more hosts are not shown ({states})", style="yellow"), Text(note)]
    return [table, Text(note)]


def _table(headings: Sequence[str], rows: Iterable[Sequence[Text | str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def _rank_rows(view: RunView, host: HostPosition) -> Iterable[Sequence[Text | str]]:
    for place, one in enumerate(host.ranks):
        batch = "-" if one.micro_batch is None else str(one.micro_batch)
        name = _host_label(host) if place == 0 else ""
        yield name, str(one.rank), f"{one.step:,}", batch, one.phase, _in_phase(one), _process(one), _slow(view, one)


def _host_row(view: RunView, host: HostPosition) -> Sequence[Text | str]:
    steps = sorted({one.step for one in host.ranks})
    span = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,}-{steps[-1]:,}"
    counts = ", ".join(f"{count} {state}" for state, count in Counter(one.process for one in host.ranks).items())
    worst = max(host.ranks, key=lambda one: _rank_concern(view, one))
    style = "" if all(one.process == RUNNING for one in host.ranks) else "red"
    where = (str(worst.rank), worst.phase, _in_phase(worst), _slow(view, worst))
    return _host_label(host), str(len(host.ranks)), span, Text(counts, style=style), *where


def _rank_concern(view: RunView, one: RankPosition) -> tuple[bool, float, float]:
    """Ranks to look at first are greater."""
    lost = one.process != RUNNING and one.phase != Phase.DONE.label
    return lost, view.slow_ratio(one.rank) or 0.0, 0.0 if one.ended else one.in_phase_s


def _concern(view: RunView, host: HostPosition) -> tuple[bool, tuple[bool, float, float]]:
    """Hosts to look at first are greater."""
    return host.state in ("silent", "stuck"), max(_rank_concern(view, one) for one in host.ranks)


def _host_label(host: HostPosition) -> Text:
    if host.state == "silent":
        return Text(f"{host.name} (no sign for {duration(host.age_s)})", style="bold red")
    if host.state == "ended":
        return Text(f"{host.name} (ended)")
    old = f" ({duration(host.age_s)} ago)" if host.age_s > OLD_S else ""
    return Text(host.name + old, style="bold red" if host.state == "stuck" else "bold")


def _in_phase(one: RankPosition) -> Text:
    if one.ended:
        return Text("-")
    return Text(duration(one.in_phase_s), style="yellow" if one.in_phase_s > LOST_S else "")


def _process(one: RankPosition) -> Text:
    return Text(one.process, style="" if one.process == RUNNING else "red")


def _slow(view: RunView, one: RankPosition) -> Text:
    ratio = view.slow_ratio(one.rank)
    return Text("" if ratio is None else f"{ratio:.2f} times as long", style="yellow")


def _foot(view: RunView) -> list[RenderableType]:
    lines: list[RenderableType] = [Text("")]
    lines += [] if view.guard is None else [Text(f"guard: {view.guard}")]
    lines += [] if view.rounds is None else _rounds(view.rounds)
    lines += [_slow_line(one) for one in view.slow]
    lines += [_line(f"slow link {place}: {text}", "yellow") for place, text in view.slow_links.items()]
    lines += _verdicts(view)
    counts = [f"{count} {_INCIDENTS[kind][count > 1]}" for kind, count in view.incidents.items() if count]
    lines.append(_line(f"incidents: {', '.join(counts) or 'none'}", "red" if counts else ""))
    if view.last_incident is not None:
        last = view.last_incident
        lines.append(Text(f"  {last.time}  {last.kind}: {last.text}; {last.path}", style="red"))
    others = (
        view.met if view.last_incident is None else [one for one in view.met if one.page != view.last_incident.path]
    )
    lines += [_line(f"  {one}", "red") for one in others[-SHOWN_MET:]]
    if view.local_clock:
        lines.append(_line("ages are by this host's clock: no file can be made in the run folder", "yellow"))
    return [*lines, *(_line(f"note: {one}", "yellow") for one in view.notes)]


def _rounds(rounds: RoundsSummary) -> list[RenderableType]:
    """The current round, and who was left out last."""
    lines: list[RenderableType] = [_line(last_round(rounds))]
    for one in rounds.left_out[-SHOWN_MET:]:
        is_out = one.last == rounds.rounds
        lines.append(_line(f"  left out: {one}", "red" if is_out else "yellow"))
    return [*lines, *(_line(f"note: {one}", "yellow") for one in rounds.notes)]


def _verdicts(view: RunView) -> Iterable[RenderableType]:
    """How many devices and hosts have each verdict, and a line for each that is not fit."""
    found = [(host.name, one) for host in _all_hosts(view) for one in host.devices]
    if not found:
        return
    counts = Counter(str(one["verdict"]) for _, one in found)
    yield _line("devices and hosts: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    for host, one in found:
        if one["verdict"] != FIT:
            yield _line(f"  {host} {one['name']}: {one['verdict']}, {one['text']}", "red")


def _line(text: str, style: str = "") -> Text:
    """A line that is cut where the terminal ends."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
