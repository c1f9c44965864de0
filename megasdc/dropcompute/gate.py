"""Decisions on which micro-batches a replica starts: the deciding rank, agreement of its ranks, and the logs.

A decision is made by the clock, or replayed from another run's ``decisions.jsonl``. That file has a line for each start
of the run, ``{"start": {"step", "data", "micro_batches"}}``, and for each step ``{"step", "planned", "completed": [of
each replica]}``. A start line invalidates logged steps after its own.

The first tensor rank of the first stage decides and sends the decision to its tensor peers at once. Each rank of a
later stage receives it from the same tensor rank of the stage before, just before the activation that it announces.
Messages use a host (CPU) group on every device type, so no rank waits for a device.

``step_times/rank_NNNNN.jsonl`` is written by the first tensor rank of each stage of each replica. Each start of the
run writes a line ``{"kind": "layout", ...}``; then each step writes a line of seconds since it began on that rank.
Reports of step times read it.
"""

from __future__ import annotations

import json
import socket
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.common.durable import LineFile, parse_json
from megasdc.common.errors import ConfigError
from megasdc.engine.partial_backward import GoesOn
from megasdc.engine.step_times import StepRecord, StepTimes
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.groups import new_host_group

Decide = Callable[[int], bool]
TimeLeft = Callable[[int], float]

MESSAGE_BYTES = 8


def replica_ranks(dims: ParallelDims, replica: int) -> list[int]:
    """The ranks of one replica, ordered by stage, then by tensor rank."""
    first = replica * dims.tensor
    per_stage = dims.tensor * dims.data
    return [first + stage * per_stage + tensor for stage in range(dims.pipeline) for tensor in range(dims.tensor)]


def new_replica_group(dims: ParallelDims) -> dist.ProcessGroup:
    """A host group of the ranks of this rank's replica.

    Collective: all ranks of the world.
    """
    return [new_host_group(replica_ranks(dims, replica)) for replica in range(dims.data)][dims.dp_rank]


class ReplicaGate:
    """Sends the decisions of one replica to all its ranks.

    Args:
        group: a host group of the replica's ranks.
        decide: function that returns whether to start a micro-batch; called on the deciding rank only.
        time_left: function that returns the seconds in which a micro-batch may still be started.
        min_micro_batches: number of micro-batches that are always started, at least 1.
        goes_on: function that returns whether a backward pass goes on; None: all do.
    """

    def __init__(
        self,
        dims: ParallelDims,
        group: dist.ProcessGroup,
        decide: Decide,
        time_left: TimeLeft,
        min_micro_batches: int,
        goes_on: GoesOn | None = None,
    ) -> None:
        self._dims = dims
        self._group = group
        self._decide = decide
        self._time_left = time_left
        self._min_micro_batches = min_micro_batches
        self._goes_on = goes_on
        self.open = False
        """Whether all micro-batches are started, and whole, without a decision; the same on all ranks of a replica."""
        self.num_sent = 0
        """Number of messages that this rank has sent since the run started."""
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._peers = [dims.rank + tensor for tensor in range(1, dims.tensor)]
        per_stage = dims.tensor * dims.data
        self._next = dims.rank + per_stage
        self._source = dims.rank - per_stage if dims.pp_rank else dims.rank - dims.tp_rank

    def time_left_s(self, micro_batch: int) -> float:
        """Seconds in which this replica may still start a micro-batch."""
        return float("inf") if self._is_certain(micro_batch) else self._time_left(micro_batch)

    def may_start(self, micro_batch: int) -> bool:
        """Decide, or receive the decision.

        Args:
            micro_batch: number of the next micro-batch; the first is 0.

        Raises:
            RuntimeError: the received decision is about another micro-batch.

        Collective: the ranks of the replica, in the order of the schedule.
        """
        if self._is_certain(micro_batch):
            return True
        if self._dims.rank == self._source:
            starts = self._decide(micro_batch)
            self._send(self._peers, micro_batch, starts)
            return starts
        return self._receive(micro_batch)

    def may_go_on(self, micro_batch: int, layers: int) -> bool:
        """Whether a backward pass goes on after so many transformer layers; on a replica of one rank.

        Only of the last micro-batch of a step it may not: of those that are always started, the last.
        """
        is_certain = self._goes_on is None or self._is_certain(micro_batch + 1)
        return is_certain or self._goes_on(micro_batch, layers)  # type: ignore[misc]

    def announce(self, micro_batch: int, starts: bool) -> None:
        """Send the decision to the next stage; does not block."""
        if not self._is_certain(micro_batch):
            self._send([self._next], micro_batch, starts)

    def finish(self) -> None:
        """End of the step: complete the sends, all of which have been received."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _is_certain(self, micro_batch: int) -> bool:
        return self.open or micro_batch < self._min_micro_batches

    def _send(self, ranks: list[int], micro_batch: int, starts: bool) -> None:
        for rank in ranks:
            message = torch.tensor([micro_batch if starts else -micro_batch])
            self._sent.append((dist.isend(message, rank, group=self._group), message))
            self.num_sent += 1

    def _receive(self, micro_batch: int) -> bool:
        message = torch.zeros(1, dtype=torch.int64)
        dist.recv(message, self._source, group=self._group)
        told = int(message)
        if abs(told) != micro_batch:
            raise RuntimeError(
                f"rank {self._dims.rank} asks for micro-batch {micro_batch}, rank {self._source} reported {abs(told)}"
            )
        return told > 0


DECISIONS_FILE = "decisions.jsonl"
REMEMBERED = 256
"""Number of most recent micro-batches from which the expected duration of the next one is computed."""


class ClockDecisions:
    """Decides by the time elapsed in the step.

    Args:
        device_lag: number of micro-batches by which the host may be ahead of its device.
        sigmas: number of standard deviations in the expected duration of a micro-batch (mean plus so many), from its
            start to the end of its backward pass on the first stage, so through the whole pipeline. A micro-batch is
            started only if it is expected to end by tau; None: if tau has not passed.
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

    def goes_on(self, _micro_batch: int, _layers: int) -> bool:
        """Whether tau has not passed, between two layers of a backward pass.

        Sync: waits until the device has come to the place of the last call.
        """
        self._times.wait_for_layer()
        return self._times.elapsed_s < self.tau_s

    def update(self, record: StepRecord, *, is_whole: bool = True) -> None:
        """Update the expected duration with the times of a finished step.

        Args:
            is_whole: whether the last backward pass was not ended.
        """
        if self._sigmas is None:
            return
        durations = [end - start for start, end in zip(record.start_s, record.end_s, strict=True)]
        self._durations.extend(durations if is_whole else durations[:-1])
        if not self._durations:
            return
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
        self._layers: int | None = None

    def begin(self, step: StepDecisions) -> None:
        """Set the step that starts now."""
        self._completed = step.completed[self._replica]
        self._layers = step.layers[self._replica] if step.layers else None

    def time_left_s(self, micro_batch: int) -> float:
        """Infinity if the other run started it, else 0."""
        return float("inf") if self.decide(micro_batch) else 0.0

    def decide(self, micro_batch: int) -> bool:
        """Whether the other run started it."""
        return micro_batch < self._completed

    def goes_on(self, micro_batch: int, layers: int) -> bool:
        """Whether the other run's backward pass came further."""
        return micro_batch + 1 < self._completed or self._layers is None or layers < self._layers


@dataclass(frozen=True)
class StepDecisions:
    """Micro-batches that one step started.

    Args:
        planned: number of micro-batches of each replica.
        completed: number of micro-batches that each replica completed, [replica].
        layers: transformer layers that the last backward pass of each replica came through, [replica], None: it was
            whole; empty: all were.
        of_layers: transformer layers of the model; 0 where ``layers`` is empty.
    """

    planned: int
    completed: tuple[int, ...]
    layers: tuple[int | None, ...] = ()
    of_layers: int = 0

    @property
    def dropped(self) -> int:
        """Number of dropped micro-batches, over all replicas."""
        return self.planned * len(self.completed) - sum(self.completed)

    @property
    def ended(self) -> dict[int, int]:
        """Transformer layers done by each replica whose last backward pass was ended."""
        return {replica: layers for replica, layers in enumerate(self.layers) if layers is not None}

    @property
    def lost(self) -> float:
        """Dropped micro-batches, with the shares of transformer layers that ended backward passes left out."""
        return self.dropped + sum(1 - layers / self.of_layers for layers in self.ended.values())

    def is_late(self, replica: int) -> bool:
        """Whether a replica dropped micro-batches or ended a backward pass."""
        return self.completed[replica] < self.planned or replica in self.ended


class DecisionLog:
    """Appends to a run's ``decisions.jsonl``; used by rank 0 only.

    Args:
        step: last step before this start.
        micro_batches: number of micro-batches of a replica's step, as configured.
    """

    def __init__(self, run_dir: Path, step: int, data: int, micro_batches: int) -> None:
        self._file = LineFile(run_dir / DECISIONS_FILE)
        self._write({"start": {"step": step, "data": data, "micro_batches": micro_batches}})

    def add(self, step: int, decisions: StepDecisions) -> None:
        """Write the decisions of one step."""
        line = {"step": step, "planned": decisions.planned, "completed": list(decisions.completed)}
        if decisions.ended:
            line |= {"layers": list(decisions.layers), "of_layers": decisions.of_layers}
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_decisions(path: Path | str, data: int, micro_batches: int | None) -> dict[int, StepDecisions]:
    """The logged decisions of a run, by step.

    Args:
        path: the run's ``decisions.jsonl``; an incomplete last line is ignored.
        data: number of replicas that the run must have.
        micro_batches: number of micro-batches that a replica's step must have; None: any number.

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
    if "layers" not in line:
        return StepDecisions(planned, completed)
    of_layers = int(line["of_layers"])
    layers = tuple(None if count is None else int(count) for count in line["layers"])
    if len(layers) != data or not all(count is None or 0 <= count <= of_layers for count in layers) or of_layers < 1:
        raise ValueError("layers outside their range")
    return StepDecisions(planned, completed, layers, of_layers)


SLOW_SHARE = 0.9
"""Least share of the steps in which a slow replica dropped micro-batches."""
UNLUCKY_SHARE = 0.5
"""Largest share of the steps in which the median replica dropped micro-batches while a replica counts as slow."""


@dataclass(frozen=True)
class SlowReplica:
    """A replica that is late in nearly every step while most others are not.

    Args:
        replica: number of the replica.
        late_steps: number of steps in which it dropped micro-batches.
        of_steps: number of steps in the window.
        median: number of such steps of the median replica.
    """

    replica: int
    late_steps: int
    of_steps: int
    median: float


class RecentSteps:
    """The last ``length`` steps in which micro-batches could be dropped."""

    def __init__(self, length: int) -> None:
        self._steps: deque[StepDecisions] = deque(maxlen=length)
        self._length = length

    def add(self, step: StepDecisions) -> None:
        """Add a step; the oldest one leaves a full window."""
        self._steps.append(step)

    @property
    def dropped(self) -> float:
        """Number of micro-batches lost in these steps, over all replicas; see ``StepDecisions.lost``."""
        return sum(step.lost for step in self._steps)

    def exceeds(self, max_drop_rate: float, per_step: int) -> bool:
        """Whether more were dropped than the rate allows in a full window.

        Args:
            max_drop_rate: allowed share of dropped micro-batches, in [0, 1].
            per_step: number of micro-batches planned in a step, over all replicas.
        """
        return self.dropped > max_drop_rate * self._length * per_step

    def slow_replicas(self) -> list[SlowReplica]:
        """Replicas late in nearly every step while the median replica is not; none before the window is full."""
        if len(self._steps) < self._length:
            return []
        replicas = range(len(self._steps[0].completed))
        late = [sum(step.is_late(replica) for step in self._steps) for replica in replicas]
        median = statistics.median(late)
        if median > UNLUCKY_SHARE * self._length:
            return []
        return [
            SlowReplica(replica, count, self._length, median)
            for replica, count in enumerate(late)
            if count >= SLOW_SHARE * self._length
        ]


STEP_TIMES_FOLDER = "step_times"


class TimeLog:
    """Appends to this rank's file of step times.

    Args:
        micro_batches: number of micro-batches of a replica's step, as configured.
        of_layers: transformer layers between which backward passes may end; 0: they are whole, and the ends of forward
            passes are not written.
    """

    def __init__(self, run_dir: Path, dims: ParallelDims, micro_batches: int, of_layers: int = 0) -> None:
        folder = run_dir / STEP_TIMES_FOLDER
        self._of_layers = of_layers
        self._file = LineFile(folder / f"rank_{dims.rank:05d}.jsonl")
        self._write(
            {
                "kind": "layout",
                "rank": dims.rank,
                "host": socket.gethostname(),
                "dp_rank": dims.dp_rank,
                "pp_rank": dims.pp_rank,
                "data": dims.data,
                "pipeline": dims.pipeline,
                "micro_batches": micro_batches,
                **({"of_layers": of_layers} if of_layers else {}),
            }
        )

    def add(self, step: int, planned: int, record: StepRecord, gc_s: float, ended_after: int | None = None) -> None:
        """Write the times of a step.

        Args:
            planned: micro-batches planned in it.
            gc_s: seconds of garbage collection.
            ended_after: transformer layers after which the last backward pass was ended; None: it is whole.
        """
        times = asdict(record)
        if not self._of_layers:
            del times["forward_end_s"]
        ended = {} if ended_after is None else {"layers": ended_after}
        self._write({"step": step, "planned": planned, **times, "gc_s": gc_s, **ended})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
