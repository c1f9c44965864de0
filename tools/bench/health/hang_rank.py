"""A rank of a drill: trains as the entry script does, and hangs, or makes others hang, where it is told to."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook, Run
from tools.bench.health.hang_kinds import Strike
from tools.bench.rank import Messages
from tools.bench.small.drill import change_hooks, train_and_leave


class Hang(Hook):
    """Brings the hang about.

    Collective: all ranks of the run make the groups of the collectives that are skipped or mixed up.
    """

    def __init__(self, strike: Strike, run: Run, struck: Path) -> None:
        self._strike, self._rank, self._struck = strike, run.dims.rank, struck
        self._causes = self._rank in strike.ranks
        self._dataset = type(run.loader.dataset)
        self._everyone = dist.new_group(backend="gloo")
        self._pairs = [dist.new_group(list(strike.ranks), backend="gloo") for _ in range(2 * (len(strike.ranks) == 2))]

    def before_step(self, run: Run) -> None:
        """Make the loader or the disk block."""
        if run.step + 1 != self._strike.step or not self._causes:
            return
        if self._strike.kind == "data":
            self._dataset.__getitem__ = self._block  # type: ignore[method-assign,assignment]
        elif self._strike.kind == "save":
            self._fsync, os.fsync = os.fsync, self._block_in_save  # type: ignore[assignment]

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Act there."""
        self._act("forward", engine)

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Act there."""
        self._act("backward", engine)

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Act there, or in collectives of the campaign's own."""
        self._act("collective", engine)
        if engine.step_number == self._strike.step:
            self._mix_up()

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Act there."""
        self._act("update", engine)

    def _act(self, phase: str, engine: TrainingEngine) -> None:
        strike = self._strike
        if not self._causes or engine.step_number != strike.step or phase != strike.phase:
            return
        self._record_start()
        if strike.kind == "loop":
            while True:
                time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGSTOP if strike.kind == "stopped" else signal.SIGKILL)

    def _mix_up(self) -> None:
        """Skip a collective that all others join, or call two in the order that the other rank has not."""
        if self._strike.kind == "skip":
            if self._causes:
                self._record_start()
            else:
                dist.all_reduce(torch.zeros(8), group=self._everyone)
        elif self._strike.kind == "order" and self._causes:
            self._record_start()
            first = self._rank == self._strike.ranks[0]
            for group in self._pairs if first else reversed(self._pairs):
                dist.all_reduce(torch.zeros(8), group=group)

    def _block_in_save(self, descriptor: Any) -> None:
        """Write what the threads of the package write, and nothing of the checkpoint."""
        if threading.current_thread() is threading.main_thread():
            self._block()
        self._fsync(descriptor)

    def _block(self, *_: Any) -> NoReturn:
        """Wait in the kernel for what never comes."""
        self._record_start()
        reading, _writing = os.pipe()
        os.read(reading, 1)
        raise AssertionError("nobody writes into this pipe")

    def _record_start(self) -> None:
        """Keep when it began; the first rank's time counts."""
        try:
            with open(self._struck, "x", encoding="utf-8") as file:
                file.write(repr(time.time()))
        except FileExistsError:
            pass


def train_and_hang(
    messages: Messages, config: Path, strike: Strike | None, struck: Path, overrides: Sequence[str]
) -> NoReturn:
    """Train, and bring a hang about; None: none. The file ``struck`` gets the time at which it began."""
    if strike is not None:
        change_hooks(lambda build, start: [*build(start), Hang(strike, start.run, struck)])
    train_and_leave(messages, config, overrides)
