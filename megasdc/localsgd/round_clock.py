"""When a replica stops its local work in a round, DropCompute on Local-SGD, and the search for that time.

A round is what a step is to DropCompute (Giladi et al. 2023, arXiv 2306.10598): a replica that passes the threshold
starts no more micro-batches, and joins the exchange with the steps that it has taken. Its last step may have fewer
micro-batches. Times begin with the round and hold all that happens between two micro-batches, such as the optimizer's
step. They are the host's: on a GPU it may be ahead of its device by what it has queued.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megasdc.dropcompute.threshold import search_recorded

Times = tuple[Sequence[float], Sequence[float]]
"""Starts and ends of a round's micro-batches, seconds since the round began, [micro-batch] each."""


@dataclass(frozen=True)
class Done:
    """Local work of a replica in a round: steps of its optimizer, and micro-batches."""

    steps: int
    micro_batches: int


class RoundClock:
    """Decides, on one rank of a replica, which micro-batches of a round are started.

    Args:
        threshold_s: seconds of a round after which no further one is; infinite: all are.
        replayed: work of this replica in rounds that are replayed, by round; None: the time decides.
    """

    def __init__(self, threshold_s: float, replayed: Mapping[int, Done] | None = None) -> None:
        self.threshold_s, self._replayed = threshold_s, replayed
        self._began = time.monotonic()
        self._round, self._steps, self._before = 1, 0, 0
        self._starts: list[float] = []
        self._ends: list[float] = []

    def begin(self, number: int, done: Done = Done(0, 0), elapsed_s: float = 0.0) -> None:
        """Begin a round, or go on within it; ``done``: before, in so many seconds."""
        self._began, self._round = time.monotonic() - elapsed_s, number
        self._steps, self._before = done.steps, done.micro_batches
        self._starts, self._ends = [], []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the round began."""
        return time.monotonic() - self._began

    def start(self) -> None:
        """A micro-batch is started, or asked for."""
        self._starts.append(self.elapsed_s)

    def end(self) -> None:
        """A micro-batch has been computed."""
        self._ends.append(self.elapsed_s)

    def end_step(self) -> None:
        """A local step has ended."""
        self._steps += 1

    def time_left_s(self, micro_batch: int) -> float:
        """Seconds in which the next micro-batch of the running step may be started."""
        if self._replayed is None:
            return self.threshold_s - self.elapsed_s
        work = self._replayed.get(self._round)
        if work is None or self._steps + 1 < work.steps:
            return math.inf
        return math.inf if self._before + len(self._ends) < work.micro_batches else 0.0

    def decide(self, micro_batch: int) -> bool:
        """Whether the next micro-batch of the running step is started."""
        return self.time_left_s(micro_batch) > 0

    @property
    def is_over(self) -> bool:
        """Whether no further step of the round is taken, asked when the micro-batches of the running one are done."""
        if self._replayed is None:
            return self.elapsed_s >= self.threshold_s
        work = self._replayed.get(self._round)
        return work is not None and self._steps + 1 >= work.steps

    @property
    def times(self) -> Times:
        """Starts and ends of the micro-batches of this round that were computed, in microseconds' precision."""
        starts, ends = ([round(one, 6) for one in some] for some in (self._starts, self._ends))
        return starts[: len(ends)], ends


class RoundWindow:
    """Times of replicas in some rounds, in which nothing was dropped, from which the threshold is chosen.

    Args:
        rounds: number of rounds, of the same replicas.
        max_drop_rate: largest share of micro-batches that may be dropped.
    """

    def __init__(self, rounds: int, max_drop_rate: float) -> None:
        self._rounds, self._max_drop_rate = rounds, max_drop_rate
        self._measured: dict[tuple[int, ...], list[tuple[list[Times], float]]] = {}
        """Times, and seconds without a micro-batch, of each round, by the replicas that took part."""
        self.threshold_s: float | None = None
        """The chosen threshold; None: not yet."""
        self.speedup = self.drop_rate = 0.0

    def add(self, times: Sequence[Times | None], seconds: float) -> None:
        """Add a round that took so many seconds; one of a single replica, or that lacks a micro-batch, is left out.

        Args:
            times: of all replicas, None where they are not known, or a replica did not take part.
        """
        known = {replica: one for replica, one in enumerate(times) if one is not None and len(one[1])}
        if self.threshold_s is not None or len(known) < 2:
            return
        measured = self._measured.setdefault(tuple(known), [])
        rows = [row[0] for row, _ in measured]
        if len({len(ends) for _, ends in (*known.values(), *rows)}) > 1:
            return
        measured.append((list(known.values()), max(0.0, seconds - max(ends[-1] for _, ends in known.values()))))
        if len(measured) < self._rounds:
            return
        starts, ends = (
            np.array([[row[replica][part] for row, _ in measured] for replica in range(len(known))]) for part in (0, 1)
        )
        found = search_recorded(starts, ends, float(np.mean([rest for _, rest in measured])), self._max_drop_rate)
        self.threshold_s, self.speedup, self.drop_rate = found.tau_s, found.speedup, found.drop_rate
