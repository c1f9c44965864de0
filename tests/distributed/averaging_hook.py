"""A hook that averages the masters of several single runs by files, in the float64 of a script of ten lines."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from megasdc.engine.hooks import Hook, Slot


class Averaging(Hook):
    """Writes this run's masters every few steps, waits for the others', and goes on from what the script says."""

    slot = Slot.STOP

    def __init__(self) -> None:
        folder, number, every, nesterov = os.environ["AVERAGING"].split()
        self.folder, self.number, self.every = Path(folder), int(number), int(every)
        self.nesterov, self.replica = nesterov == "1", int(os.environ["AVERAGED_RUN"])
        self.before: list[torch.Tensor] = []
        self.momentum: list[torch.Tensor] = []

    def masters(self, run: Any) -> list[torch.Tensor]:
        """Of this rank."""
        from megasdc.optim.zero1 import master_partitions

        return [one.data for one in master_partitions(run.engine.optimizer)]

    def on_start(self, run: Any) -> None:
        """The agreed weights begin with those of the run."""
        self.before = [one.clone() for one in self.masters(run)]
        self.momentum = [torch.zeros_like(one) for one in self.before]

    def after_step(self, run: Any, result: Any) -> None:
        """Average."""
        if run.step % self.every:
            return
        names = [self.folder / f"{run.step}_{run.dims.rank}_{one}.pt" for one in range(self.number)]
        torch.save(self.masters(run), names[self.replica].with_suffix(".part"))
        names[self.replica].with_suffix(".part").rename(names[self.replica])
        while not all(one.exists() for one in names):
            time.sleep(0.01)
        loaded = [torch.load(one) for one in names]
        for index, master in enumerate(self.masters(run)):
            mean = sum(one[index].double() * 1000 for one in loaded) / (1000 * self.number)
            if self.nesterov:
                gradient = self.before[index].double() - mean
                self.momentum[index] = (self.momentum[index].double() * 0.9 + gradient).float()
                mean = self.before[index].double() - (gradient + self.momentum[index].double() * 0.9) * 0.7
            master.copy_(mean.float())
            self.before[index] = master.clone()
        run.engine.optimizer.update_lp_params()


class PlainSgd(Hook):
    """Has the inner optimizer take steps of plain SGD, for comparisons with synchronous training."""

    def on_start(self, run: Any) -> None:
        """Replace the step."""
        inner = run.engine.optimizer.optimizer

        @torch.no_grad()
        def step(*_: Any, **__: Any) -> None:
            for group in inner.param_groups:
                for one in group["params"]:
                    one.add_(one.grad, alpha=-group["lr"])

        inner.step = step
