"""What it costs to go on without a replica, ``python -m tools.bench isolation-rate``: time of steps, with and without.

Micro-batches are slept, as an accelerator would take its time, so that a step's time is in proportion to how many of
them a replica takes. Of N replicas the others then take N / (N - 1) of the time for the same samples. While none is
left out, that one could be must cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.common.errors import MegasdcError
from megasdc.events import read_events
from megasdc.metrics.writer import read_metrics
from tools.bench.campaign import Layout
from tools.bench.isolation.config import write_config
from tools.bench.isolation.options import RateOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Report, Result, interval, table, verdict
from tools.bench.small.drill import prepare_texts
from tools.bench.small.launches import launch
from tools.bench.statistics import SLACK, Estimate, estimate_median

LEAVE_OUT = 5
"""Step in which a replica becomes wrong."""
FIRST = 9
"""Step from which steps are compared: later than those that begin again, and allocate."""
FEWER_BAR, READY_BAR = 0.03, 1.01
"""Largest distance from (N - 1) / N, relative; largest ratio of step times while no replica is left out."""
_FAULT = {"kind": "scale", "factor": 1.5, "submodule": "*.linear_fc1", "replica": 1, "steps": [LEAVE_OUT, None]}


@dataclass(frozen=True)
class Rates:
    """Of one layout.

    Args:
        fewer: samples per second with a replica left out over those with all.
        ready: time of a step where replicas could be left out over where all would halt.
    """

    layout: Layout
    fewer: Estimate
    ready: Estimate

    @property
    def expected(self) -> float:
        """(N - 1) / N."""
        return (self.layout[2] - 1) / self.layout[2]

    @property
    def passed(self) -> bool:
        """Whether both bars are met."""
        return abs(self.fewer.median / self.expected - 1) <= FEWER_BAR and self.ready.passes(READY_BAR, SLACK)


@dataclass(frozen=True)
class RateResult(Result):
    """All layouts."""

    judged = ("rates",)
    rates: Sequence[Rates] = field(repr=False)

    def report(self) -> Report:
        """A row for each layout."""
        rows = [
            (
                "x".join(map(str, one.layout)),
                interval(one.fewer, 4, link=" - "),
                f"{one.expected:.3f}, within {FEWER_BAR:.0%}",
                interval(one.ready, 4, link=" - "),
                f"{READY_BAR}",
                verdict(one.passed),
            )
            for one in self.rates
        ]
        columns = ("layout", "rate without a replica", "bar", "step time while none is left out", "bar", "verdict")
        yield table("ratios, median and its interval", columns, rows)


def bench_isolation_rate(options: RateOptions, on_progress: Progress = ignore_progress) -> RateResult:
    """Run each layout with all ranks on this machine.

    Raises:
        MegasdcError: a run has failed, or left out no replica.
    """
    machine, found = describe_machine(), []
    for number, layout in enumerate(options.sizes):
        with scratch_folder() as folder:
            data = prepare_texts(folder)
            rounds = []
            for turn in range(options.rounds):
                on_progress("rounds", number * options.rounds + turn, len(options.sizes) * options.rounds)
                rounds.append(_round(folder / f"round_{turn}", data, layout, options))
            halt, isolate, left = ([one for times in rounds for one in times[kind]] for kind in range(3))
            fewer = [all_s / left_s for all_s, left_s in zip(halt, left, strict=True)]
            ready = [ready_s / halt_s for ready_s, halt_s in zip(isolate, halt, strict=True)]
            found.append(Rates(layout, estimate_median(fewer), estimate_median(ready)))
    return RateResult(machine, options, found)


def _round(folder: Path, data: Path, layout: Layout, options: RateOptions) -> list[list[float]]:
    """Seconds of the compared steps of three runs: all halt at a finding, others would go on, others go on."""
    delay = {"delay": [{"kind": "normal", "mean_s": options.micro_batch_s, "std_s": 0.0}]}
    halting = {"sdc": {"always_on": {"enabled": True, "coverage": "all", "slice_elements": 1_000_000, "rows": True}}}
    kinds: Sequence[Mapping[str, Any]] = ({**delay, **halting}, delay, {**delay, "faults": [_FAULT]})
    folder.mkdir()
    steps = FIRST + options.steps - 1
    runs = [write_config(folder / str(number), data, layout, steps, more) for number, more in enumerate(kinds)]
    ranks = math.prod(layout)
    codes = launch([(run, [], ranks) for run in runs], ranks, folder)
    left_out = [any(read_events(run.parent, kind="isolation")) for run in runs]
    if any(map(any, codes)) or left_out != [False, False, True]:
        raise MegasdcError(f"the runs ended with exit codes {codes}; replicas were left out of them: {left_out}")
    return [_step_times(run.parent) for run in runs]


def _step_times(run: Path) -> list[float]:
    times = {row["step"]: row["speed/step_s"] for row in read_metrics(run) if "speed/step_s" in row}
    return [seconds for step, seconds in sorted(times.items()) if step >= FIRST]
