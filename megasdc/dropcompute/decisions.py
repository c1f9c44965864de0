"""Decisions which micro-batches a replica starts: by the clock, or replayed from another run's ``decisions.jsonl``.

``decisions.jsonl`` has a line for each start of the run, ``{"start": {"step", "data", "micro_batches"}}``, and for each
step ``{"step", "planned", "completed": [of each replica]}``. A start line invalidates logged steps after its own.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import LineFile, parse_json
from megasdc.common.errors import ConfigError
from megasdc.engine.step_times import StepRecord, StepTimes

DECISIONS_FILE = "decisions.jsonl"
REMEMBERED = 256
"""Most recent micro-batches from which the expected duration of the next one is computed."""


class ClockDecisions:
    """Decides by the time elapsed in the step.

    Args:
        device_lag: micro-batches that the host may be ahead of its device.
        sigmas: None: a micro-batch is started if tau has not passed. Else only if it is expected to end by tau: its
            expected duration is the mean plus so many standard deviations, from its start to the end of its backward
            pass on the first stage (so through the whole pipeline).
    """

    def __init__(self, times: StepTimes, device_lag: int, sigmas: float | None) -> None:
        self._times = times
        self._lag = device_lag
        self._sigmas = sigmas
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self._expected_s = 0.0
        self.tau_s = float("inf")

    def time_left_s(self, micro_batch: int) -> float:
        """Seconds until the deadline for starting the next micro-batch; negative once it has passed."""
        self._times.wait_for(micro_batch - 1 - self._lag)
        return self.tau_s - self._expected_s - self._times.elapsed_s

    def decide(self, micro_batch: int) -> bool:
        """Whether the replica starts this micro-batch."""
        return self.time_left_s(micro_batch) > 0

    def learn(self, record: StepRecord) -> None:
        """Update the expected duration with the times of a finished step."""
        if self._sigmas is None:
            return
        self._durations.extend(end - start for start, end in zip(record.start_s, record.end_s, strict=True))
        self._expected_s = expected_time_s(list(self._durations), self._sigmas)


def expected_time_s(durations_s: Sequence[float], sigmas: float) -> float:
    """Expected duration of a micro-batch: mean plus ``sigmas`` standard deviations of the last ``REMEMBERED`` ones.

    Sums are exactly rounded.
    """
    last = durations_s[-REMEMBERED:]
    return statistics.fmean(last) + sigmas * statistics.pstdev(last)


class ReplayedDecisions:
    """Repeats the decisions of another run."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._completed = 0

    def begin(self, step: StepDecisions) -> None:
        """Set the step that starts now."""
        self._completed = step.completed[self._replica]

    def time_left_s(self, micro_batch: int) -> float:
        """Infinity if the other run started it, else 0."""
        return float("inf") if self.decide(micro_batch) else 0.0

    def decide(self, micro_batch: int) -> bool:
        """Whether the other run started it."""
        return micro_batch < self._completed


@dataclass(frozen=True)
class StepDecisions:
    """Micro-batches that one step started.

    Args:
        planned: micro-batches of each replica.
        completed: by each replica, [replica].
    """

    planned: int
    completed: tuple[int, ...]

    @property
    def dropped(self) -> int:
        """Micro-batches dropped, over all replicas."""
        return self.planned * len(self.completed) - sum(self.completed)


class DecisionLog:
    """Appends to a run's ``decisions.jsonl``; used by rank 0 only.

    Args:
        step: last step before this start.
        micro_batches: of a replica's step, as configured.
    """

    def __init__(self, run_dir: Path, step: int, data: int, micro_batches: int) -> None:
        self._file = LineFile(run_dir / DECISIONS_FILE)
        self._write({"start": {"step": step, "data": data, "micro_batches": micro_batches}})

    def add(self, step: int, decisions: StepDecisions) -> None:
        """Write the decisions of one step."""
        self._write({"step": step, "planned": decisions.planned, "completed": list(decisions.completed)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_decisions(path: Path | str, data: int, micro_batches: int | None) -> dict[int, StepDecisions]:
    """The logged decisions of a run, by step.

    Args:
        path: its ``decisions.jsonl``; an incomplete last line is ignored.
        data: number of replicas that it must have.
        micro_batches: of a replica's step that it must have; None: any number.

    Raises:
        ConfigError: the file is missing, is no such log, or is of another layout.
    """
    place = "megasdc.drop_compute.replay_decisions"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: {path} cannot be read ({error}); name the {DECISIONS_FILE} of a run.") from error
    steps: dict[int, StepDecisions] = {}
    for number, text in enumerate(lines, 1):
        if number == len(lines) and not text.endswith("\n"):
            break
        try:
            line = parse_json(text)
            if "start" in line:
                last, found = int(line["start"]["step"]), (line["start"]["data"], line["start"]["micro_batches"])
                steps = {step: one for step, one in steps.items() if step <= last}
                if found != (data, found[1] if micro_batches is None else micro_batches):
                    wanted = "" if micro_batches is None else f" with {micro_batches}"
                    raise ConfigError(
                        f"{place}: {path} is of {found[0]} replicas with {found[1]} micro-batches a step, this run has "
                        f"{data}{wanted}; use the same numbers, or another file."
                    )
            else:
                steps[int(line["step"])] = _step_of(line, data)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{place}: line {number} of {path} is not a decision: {text.strip()[:80]!r}.") from error
    return steps


def _step_of(line: dict[str, Any], data: int) -> StepDecisions:
    planned, completed = int(line["planned"]), tuple(int(count) for count in line["completed"])
    if len(completed) != data or not all(1 <= count <= planned for count in completed):
        raise ValueError("counts outside their range")
    return StepDecisions(planned, completed)
