"""What does a rank of the speed-up benchmark do? Started by ``megasdc.bench.ranks``, one process a rank.

The first run has no threshold; from half of its steps come the thresholds of the next ones; the last chooses its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megasdc.bench.drop_run import StepWalls, end_rank, start_rank, train_once
from megasdc.bench.drop_speedup import AUTO, NEVER, options_of
from megasdc.bench.drop_speedup_scores import choose_thresholds, recorded_steps
from megasdc.bench.ranks import Messages
from megasdc.engine.engine import StepResult
from megasdc.parallel.collectives import gather_objects
from megasdc.train.drop_compute import DropCompute
from megasdc.train.main import set_up_logging
from megasdc.train.run import Run


class ToldWalls(StepWalls):
    """Also tells how many steps of all runs are done.

    Args:
        messages: where to.
        done: steps of the runs before.
    """

    def __init__(self, messages: Messages, done: int) -> None:
        super().__init__()
        self._messages, self._before = messages, done

    @property
    def done(self) -> int:
        """Steps of all runs."""
        return self._before + len(self.seconds)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Tell it."""
        super().after_step(run, result)
        self._messages.send(done=self.done)


def measure(request: dict[str, Any], messages: Messages) -> None:
    """Make all runs, and report seconds of steps and the threshold of each.

    Args:
        request: options, and where runs write.
        messages: where to report.
    """
    options, folder = options_of(request), Path(request["folder"])
    dims = start_rank()
    done = 0

    def make(name: str, threshold: float | str) -> Path:
        nonlocal done
        walls = ToldWalls(messages, done)
        run = train_once(options.config(folder / name, threshold), dims, walls, options.gpt.vocab)
        done = walls.done
        drop = run.hooks[0]
        assert isinstance(drop, DropCompute)
        tau_s = drop.state_dict()["tau_s"]
        messages.send(done=done, folder=str(run.folder), walls_s=walls.seconds, tau_s=tau_s)
        return run.folder

    plain = make(NEVER, NEVER)
    steps = recorded_steps(plain, options.second) if dims.rank == 0 else None
    taus = gather_objects(None if steps is None else choose_thresholds(steps, options.drop_rates))[0]
    assert taus is not None, "rank 0 chose them"
    for number, tau_s in enumerate(taus):
        make(f"tau_{number}", tau_s)
    make(AUTO, AUTO)
    end_rank()


def main() -> None:
    """Run the request of the command line."""
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    measure(json.loads(sys.argv[1]), messages)


if __name__ == "__main__":
    main()
