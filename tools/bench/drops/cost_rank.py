"""One rank of the cost benchmark of DropCompute.

Ours is everything that ``DropCompute``, its ``StepTimes`` and its gate do in the engine and between steps: deciding,
sending, announcing, marks, the sum of counts, logs. Hearing a decision counts from when its sender began to send it:
what a rank waits before that is waiting for the stage or tensor rank before it, whose activation it would have waited
for just as long. All ranks are on one host and read one clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch.distributed as dist

from megasdc.dropcompute.gate import ReplicaGate
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.run_ranks import Messages
from megasdc.train.drop_compute import DropCompute
from megasdc.train.main import set_up_logging
from tools.bench.detection.overhead_rank import Clock, Timed, TimedAgreement
from tools.bench.drops.run import build_drop_run, drop_compute_of, end_rank, start_rank

Moments = dict[int, float]
"""By micro-batch, seconds on the host's clock."""


class TimedGate:
    """Stands for a rank's gate, adds up the time inside its calls, and keeps when it told and heard what.

    Args:
        inner: the gate.
        dims: place of this rank.
    """

    def __init__(self, inner: ReplicaGate, dims: ParallelDims) -> None:
        self._inner = inner
        self.clock = Clock()
        self._decides = dims.is_first_stage and dims.tp_rank == 0
        self.source = dims.rank - dims.tensor * dims.data if dims.pp_rank else dims.rank - dims.tp_rank
        self._hears_by = "announced" if dims.pp_rank else "decided"
        self.told: dict[str, Moments] = {"decided": {}, "announced": {}}
        self._heard: dict[int, tuple[float, float]] = {}

    def time_left_s(self, micro_batch: int) -> float:
        """Time it."""
        return float(self.clock.timed("decide", self._inner.time_left_s, micro_batch))

    def may_start(self, micro_batch: int) -> bool:
        """Time it where it is decided; elsewhere keep when the answer was waited for."""
        began = time.perf_counter()
        if self._decides:
            self.told["decided"][micro_batch] = began
            return bool(self.clock.timed("decide", self._inner.may_start, micro_batch))
        starts = self._inner.may_start(micro_batch)
        self._heard[micro_batch] = (began, time.perf_counter())
        return starts

    def announce(self, micro_batch: int, starts: bool) -> None:
        """Time it."""
        self.told["announced"][micro_batch] = time.perf_counter()
        self.clock.timed("announce", self._inner.announce, micro_batch, starts)

    def heard_s(self, told: list[dict[str, Moments]]) -> float:
        """Seconds in which this rank heard decisions, without waiting for who told them.

        Args:
            told: of every rank, in the step that ended.
        """
        moments = told[self.source][self._hears_by]
        return sum(max(0.0, ended - max(began, moments[one])) for one, (began, ended) in self._heard.items())

    def begin(self) -> None:
        """A step begins."""
        self.clock.parts.clear()
        self.told = {"decided": {}, "announced": {}}
        self._heard.clear()


def measure(request: dict[str, Any], messages: Messages) -> None:
    """Take steps and report what each of them took.

    Args:
        request: configuration, and entries of the vocabulary.
        messages: where to report.
    """
    config = request["config"]
    parallel = config["megasdc"]["parallel"]
    dims = start_rank(parallel["tensor"], parallel["pipeline"])
    run = build_drop_run(config, dims, request["vocab"])
    drop = drop_compute_of(run)
    gate, marks, calls = TimedGate(drop.gate, dims), Clock(), Clock()
    hook: Any = Timed(drop, calls)
    run.engine.gate = gate
    run.engine.agreement = TimedAgreement(calls)
    run.engine.hooks = [_timed(one, drop, marks, hook) for one in run.engine.hooks]
    drop.on_start(run)
    for step in range(run.steps):
        for clock in (marks, calls):
            clock.parts.clear()
        gate.begin()
        sent = drop.gate.num_sent
        dist.barrier()
        began = time.perf_counter()
        hook.before_step(run)
        result = run.engine.train_step(run.batches)
        run.step = result.step
        hook.after_step(run, result)
        wall_s = time.perf_counter() - began
        heard_s = gate.heard_s(gather_objects(gate.told))
        parts = {
            "decide, send": gate.clock.parts.get("decide", 0.0),
            "announce": gate.clock.parts.get("announce", 0.0),
            "hear": heard_s,
            "marks": sum(marks.parts.values()),
            "count, exchange, log": sum(calls.parts.values()),
        }
        record = drop.times.take()
        found = gather_objects((wall_s, parts, record.busy_s, drop.gate.num_sent - sent))
        slowest = max(found, key=lambda one: sum(one[1].values()) / one[0])
        if step:  # the first one is slower
            micro_batch_s = sum(found[0][2]) / len(found[0][2])
            num_sent = sum(one[3] for one in found)
            messages.send(wall_s=slowest[0], parts=slowest[1], micro_batch_s=micro_batch_s, messages=num_sent)
    drop.close()
    run.events.close()
    end_rank()


def _timed(hook: Any, drop: DropCompute, marks: Clock, calls: Any) -> Any:
    if hook is drop.times:
        return Timed(hook, marks)
    return calls if hook is drop else hook


def main() -> None:
    """Run the request of the command line."""
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    measure(json.loads(sys.argv[1]), messages)


if __name__ == "__main__":
    main()
