"""Isolation, ``python -m tools.bench isolation``: do runs go on right without replicas whose faults go on?

Real ranks of this machine train a tiny model with all checks, and one or two replicas become wrong for good: in what
they compute, in memory of the optimizer or of the weights, in what they give to collectives. Exactly these must be left
out, and the run must end with every loss and every bit of its last checkpoint as a run without faults whose replicas
end at the same steps. Clean runs must leave nobody out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.events import Event, read_events
from megasdc.sdc.incident import load_incidents
from tools.bench.campaign import Campaign, CampaignLog, Layout, layout_text, median_and_most, tables
from tools.bench.checkpoints.recovery_checks import End, read_end, why_different
from tools.bench.isolation.config import write_config
from tools.bench.isolation.kinds import AGAIN, KINDS, STEPS, Harm, draw_harm
from tools.bench.isolation.options import MORE, IsolationOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Report, Result
from tools.bench.small.drill import prepare_texts
from tools.bench.small.launches import AT_A_TIME, launch


@dataclass(frozen=True)
class Isolated:
    """One time that replicas were left out.

    Args:
        found: step in which they were found wrong.
        resumed: step that the others went on from.
        replicas: that are left.
        seconds: from the verdict to the begin of the next step.
    """

    found: int
    resumed: int
    replicas: int
    seconds: float


@dataclass(frozen=True)
class Drill:
    """What came of a run with faults; ``problems``: what was not right, a line each."""

    layout: Layout
    harm: Harm
    isolated: tuple[Isolated, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class IsolationResult(Result):
    """All drills."""

    also = ("passed", "lost_steps", "seconds")

    drills: Sequence[Drill] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether all was right in all drills, and some replica was left out."""
        return not any(one.problems for one in self.drills) and any(one.isolated for one in self.drills)

    @property
    def lost_steps(self) -> list[int]:
        """Steps that were rerun, beside the one in which a replica was found wrong."""
        return sorted(one.found - 1 - one.resumed for drill in self.drills for one in drill.isolated)

    @property
    def seconds(self) -> list[float]:
        """From a verdict to the begin of the next step."""
        return sorted(one.seconds for drill in self.drills for one in drill.isolated)

    def report(self) -> Report:
        """Counts by kind and by layout, and what was not right."""
        columns = ("drills", "right", "left out", "steps lost, median and most", "s to go on, median and most")
        keys = {"kind": lambda one: KINDS[one.harm.kind].title, "layout": layout_text}
        yield from tables("isolation", self.drills, keys, columns, _row)
        for one in self.drills:
            for problem in one.problems:
                yield f"{layout_text(one)} {one.harm}: {problem}"


def _row(drills: Sequence[Drill]) -> tuple[object, ...]:
    found = [one for drill in drills for one in drill.isolated]
    right = sum(not one.problems for one in drills)
    lost = median_and_most((one.found - 1 - one.resumed for one in found), ".3g")
    return len(drills), right, len(found), lost, median_and_most((one.seconds for one in found), ".3g")


def bench_isolation(
    options: IsolationOptions, log: Path | None = None, on_progress: Progress = ignore_progress
) -> IsolationResult:
    """Run the drills that are not in the log yet, with all ranks on this machine.

    Args:
        log: file that keeps finished drills; None: none does.

    Raises:
        MegasdcError: a rank failed in another way than by ending its training, or the log cannot be used.
    """
    machine, kept = describe_machine(), CampaignLog(log, options, Drill)
    campaign = Campaign("runs with faults", _plan(options), _run, kept)
    return IsolationResult(machine, options, campaign.finish(on_progress))


def _plan(options: IsolationOptions) -> list[tuple[Layout, Harm]]:
    """Kinds, layouts and types in turn; those of a layout one after the other."""
    chance, planned = random.Random(options.seed), dict[Layout, list[Harm]]()
    for number in range(options.drills):
        kind = options.drawn[number % len(options.drawn)]
        turn = number // len(options.drawn)
        fit = [one for one in options.sizes if one[2] > MORE + (kind == AGAIN)]
        layout = fit[turn % len(fit)]
        planned.setdefault(layout, []).append(draw_harm(kind, layout, ("fp32", "bf16")[turn % 2], chance))
    return [(layout, harm) for layout, harms in planned.items() for harm in harms]


def _run(left: Sequence[tuple[int, tuple[Layout, Harm]]], keep: Callable[[Drill], None]) -> None:
    for layout in dict.fromkeys(layout for _, (layout, _) in left):
        harms = [harm for _, (own, harm) in left if own == layout]
        with scratch_folder() as folder:
            runs = _Runs(folder, prepare_texts(folder), layout)
            for first in range(0, len(harms), AT_A_TIME):
                for drill in runs.drills(harms[first : first + AT_A_TIME]):
                    keep(drill)


class _Runs:
    """The runs of one layout."""

    def __init__(self, folder: Path, data: Path, layout: Layout) -> None:
        self._folder, self._data, self._layout = folder, data, layout
        self._ranks, self._per_replica = math.prod(layout), layout[0] * layout[1]
        self._right: dict[tuple[Any, ...], Path] = {}
        self._ends: dict[Path, End] = {}
        self._drills = 0

    def drills(self, harms: Sequence[Harm]) -> list[Drill]:
        """Run some drills, then the runs without faults that they are compared with."""
        first, self._drills = self._drills, self._drills + len(harms)
        runs = [self._config(f"drill_{number}", harm, harm.specs) for number, harm in enumerate(harms, first)]
        codes = launch([(run, [], self._ranks) for run in runs], self._ranks, self._folder)
        found = [_isolated(run.parent) for run in runs]
        right, ends, launches = self._right, self._ends, []
        for harm, isolated in zip(harms, found, strict=True):
            key = (harm.precision, *((one.resumed, one.replicas) for one in isolated))
            if key not in right:
                right[key] = self._config(f"right_{len(right)}", harm, [])
                launches += list(self._without(right[key], isolated))
        launch(launches, self._ranks, self._folder)
        drills = []
        for number, (harm, isolated) in enumerate(zip(harms, found, strict=True)):
            run = right[harm.precision, *((one.resumed, one.replicas) for one in isolated)]
            if run not in ends:
                ends[run] = _end(run.parent)
            problems = _problems(runs[number].parent, harm, isolated, codes[number], self._layout)
            problems = problems or why_different(_end(runs[number].parent), ends[run])
            drills.append(Drill(self._layout, harm, isolated, tuple(problems)))
        return drills

    def _without(self, run: Path, isolated: Sequence[Isolated]) -> Iterator[tuple[Path, list[str], int]]:
        """Launches of a run without faults: with all replicas, then with as many as were left each time."""
        ranks = self._ranks
        for one in isolated:
            yield run, [f"megasdc.training.stop_step={one.resumed}"], ranks
            ranks = one.replicas * self._per_replica
        yield run, [] if ranks == self._ranks else ["megasdc.sdc.policy={}"], ranks

    def _config(self, name: str, harm: Harm, faults: Sequence[dict[str, Any]]) -> Path:
        bf16 = {"bf16": {"enabled": True}} if harm.precision == "bf16" else {}
        more = {"audit": {"enabled": True, "interval": 1}, "faults": faults}
        return write_config(self._folder / name, self._data, self._layout, STEPS, more, bf16)


def _end(run: Path) -> End:
    return read_end(run, run / "checkpoints")


def _isolated(run: Path) -> tuple[Isolated, ...]:
    """The times that replicas were left out of a run."""
    events = sorted(read_events(run, rank=0), key=lambda one: one.time)
    found = []
    for number, one in enumerate(events):
        if (one.kind, one.name) == ("isolation", "begun"):
            verdict = _last(events[:number], "sdc", "verdict")
            resumed = next((later for later in events[number:] if later.kind == "resume"), None)
            begun = next((later for later in events[number:] if (later.kind, later.name) == ("start", "phases")), None)
            assert one.step is not None
            step = 0 if resumed is None or resumed.step is None else resumed.step
            seconds = math.nan
            if verdict is not None and begun is not None:
                seconds = begun.time - begun.fields["step_s"] - verdict.time
            found.append(Isolated(one.step, step, one.fields["replicas"], round(seconds, 3)))
    return tuple(found)


def _last(events: Sequence[Event], kind: str, name: str) -> Event | None:
    return next((one for one in reversed(events) if (one.kind, one.name) == (kind, name)), None)


def _problems(run: Path, harm: Harm, isolated: Sequence[Isolated], codes: Sequence[int], layout: Layout) -> list[str]:
    """What was not right besides the bits at the end."""
    if any(codes):
        return [f"ranks ended with exit codes {list(codes)}"]
    replicas = list(range(layout[2]))
    named = []
    for _, incident in sorted(load_incidents(run / "reports", []), key=lambda one: one[1].time):
        places = sorted({one.dp_rank for one in incident.flagged})
        if incident.done == "isolated":
            named += [replicas[place] for place in places]
            replicas = [one for place, one in enumerate(replicas) if place not in places]
        elif not {replicas[place] for place in places} <= set(harm.replicas):
            return [f"step {incident.step}: the {incident.tier} check named replicas {places}, which were right"]
    wrong = _wrong(run, harm)
    if named != wrong:
        return [f"left out were replicas {named}, wrong were {wrong}"]
    if not wrong and list((run / "reports").glob("incident*")):
        return ["something was found in a clean run"]
    return []


def _wrong(run: Path, harm: Harm) -> list[int]:
    """Replicas in which a fault has changed something: a shard may hold no element that it is in."""
    fired = {one.fields["spec"] for one in read_events(run, kind="fault", name="injected") if one.fields["changed"] > 0}
    return [one for one in harm.replicas if any(harm.specs[spec]["replica"] == one for spec in fired)]
