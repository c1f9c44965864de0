"""The hook by which a training waits for its turn between blocks of steps, and measures them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run
from megasdc.features import FEATURES
from megasdc.train.build import Features, Start
from megasdc.train.detection.step_checker import StepChecker
from tools.bench.detection.options import ProtectOptions
from tools.bench.rank import Messages
from tools.bench.statistics import Cost
from tools.bench.training.steps_rank import LONGEST_TURN


def _now() -> Cost:
    """Wall and processor time of this rank so far, all threads."""
    return Cost(time.perf_counter(), time.process_time())


def _since(began: Cost) -> Cost:
    now = _now()
    return Cost(now.wall_s - began.wall_s, now.cpu_s - began.cpu_s)


@dataclass
class Block:
    """A block of steps on this rank: where it began, what audited steps took, and their number."""

    began: Cost
    audited: Cost = field(default_factory=lambda: Cost(0.0, 0.0))
    audits: int = 0


class Turns(Hook):
    """Waits for its turn before each block of steps; comes after all other hooks.

    What ranks do in the background goes on in the other's turn; so blocks end between two snapshots.
    """

    def __init__(self, run: Run, messages: Messages, options: ProtectOptions) -> None:
        self._messages, self._options = messages, options
        self._waiting = dist.new_group(backend="gloo", timeout=LONGEST_TURN)
        self._checker = next((one for one in run.hooks if isinstance(one, StepChecker)), None)
        self._block: Block | None = None
        self._is_audited, self._began = False, _now()
        self._blocks: list[dict[str, Any]] = []

    def on_start(self, run: Run) -> None:
        """Wait for the turn in which to warm up, so that what the run measures then has the machine for itself."""
        self._wait(run)

    def before_step(self, run: Run) -> None:
        """Find out whether the step is audited."""
        self._is_audited = self._checker is not None and self._checker.is_audit(run.engine.step_number)

    def after_step(self, run: Run, result: StepResult) -> None:
        """End a step, and a block if it was its last.

        Collective: all ranks of the world, at the end of a block.
        """
        if self._block is not None and self._is_audited:
            self._block.audited += _since(self._began)
            self._block.audits += 1
        measured = run.step - self._options.warmup_steps
        if measured >= 0 and measured % self._options.steps_per_block == 0:
            dist.barrier(group=self._waiting)
            if self._block is not None:
                self._keep(self._block)
            self._wait(run)
            self._block = Block(_now())
        self._began = _now()

    def _keep(self, block: Block) -> None:
        """Keep a block's wall time on rank 0, and the processor time of all ranks."""
        whole = _since(block.began)
        cpu = torch.tensor([whole.cpu_s, block.audited.cpu_s], dtype=torch.float64)
        dist.all_reduce(cpu, group=self._waiting)
        total, audited = cpu.tolist()
        own = {"whole": Cost(whole.wall_s, total), "audited": Cost(block.audited.wall_s, audited)}
        self._blocks.append({**own, "audits": block.audits})

    def _wait(self, run: Run) -> None:
        run.enter("SAVE")  # which may take longer than what a step does
        self._messages.send_and_wait()
        dist.barrier(group=self._waiting)
        run.enter("BETWEEN")

    def on_end(self, run: Run) -> None:
        """Report what the blocks took, and what the run itself says of its checks."""
        told: dict[str, Any] = {}
        if self._checker is not None:
            budget = self._checker.budget
            told = {"cadence": budget.cadence, "shares": budget.shares, "budget": budget.share}
        self._messages.send(side={"blocks": self._blocks, "told": told})


def with_turns(messages: Messages, options: ProtectOptions) -> Features:
    """The features of a run, with the hook after all others."""

    def build(start: Start) -> list[Hook]:
        start.run.hooks = FEATURES.build_hooks(start)
        return [*start.run.hooks, Turns(start.run, messages, options)]

    return Features(build, FEATURES.share_launch)
