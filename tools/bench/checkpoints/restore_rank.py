"""Ranks of the benchmark of restarts: one that restores in blocks, and ranks that fail and start again.

Each rank that restarts may have a host name of its own, so that ranks on this machine are on different hosts for all
that asks; only then is there a partner. A rank fails by an error of its last hook, as any error ends a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run
from megasdc.parallel.collectives import gather_objects
from tools.bench.clocks import Clock
from tools.bench.rank import Messages, join_ranks
from tools.bench.small.drill import name_host, train_with

_STEP_S = 0.5
"""Length of steps from which writers have time for their snapshots."""
SAVED_STEP = 20
"""Steps between checkpoints on the disk."""
FIND, VERIFY, LOAD = "find", "verify", "load"
RESUME_PARTS = {
    "find_memory_checkpoint": "find and verify in memory",
    "find_checkpoint": "find and verify on the disk",
    "restore": "put together from memory",
    "load_checkpoint": "load into the engine",
}
"""Functions of a resume, and their parts of it."""


# --- the rate -------------------------------------------------------------------------------------------------------


def restore_in_blocks(messages: Messages, raw: dict[str, Any], folder: Path, restores: int) -> None:
    """Save once, then restore several times, each time after an answer; send the seconds of each part."""
    from megasdc.checkpoint import load, resume
    from megasdc.checkpoint.ranks import CheckpointGroup
    from megasdc.checkpoint.save import save_checkpoint
    from megasdc.checkpoint.snapshot import SavedState
    from megasdc.determinism import capture_rng
    from megasdc.train.main import train_step
    from tools.bench.small.runs import build_run

    dims = join_ranks()
    run, _ = build_run(raw, dims)
    train_step(run)
    ranks = CheckpointGroup()
    save_checkpoint(run.engine, folder, run.step, SavedState({}, {"rng": capture_rng()}, {}), dims, ranks)
    clock = Clock()
    resume.check_file = clock.wrap(VERIFY, resume.check_file)  # type: ignore[attr-defined]
    for _ in range(restores):
        messages.send_and_wait(ready=True)
        chosen = clock.timed(FIND, resume.find_checkpoint, folder, dims, ranks)
        clock.timed(LOAD, load.load_checkpoint, run.engine, chosen, dims, ranks)
        messages.send(parts=clock.pop_parts())
    for hook in run.hooks:
        hook.close()


# --- restarts -------------------------------------------------------------------------------------------------------


class EnoughError(Exception):
    """The rank has done what it was started for."""


@dataclass
class Ending(Hook):
    """Ends a run by an error once something holds after a step."""

    holds: Callable[[Run], bool]
    tell: Callable[[Run], None] = field(default=lambda run: None)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Look."""
        if self.holds(run):
            self.tell(run)
            raise EnoughError("this is a benchmark, which ends its runs so")


def train_and_fail(messages: Messages, config: Path, hosts: Sequence[str]) -> None:
    """Train until a step is on the disk, and that or a newer one in the memory of all ranks; then fail."""
    from megasdc.train.checkpointer import MemoryCheckpoints

    def ending(hooks: Sequence[Hook], _: Any) -> Hook:
        (memory,) = (hook for hook in hooks if isinstance(hook, MemoryCheckpoints))

        def holds(run: Run) -> bool:
            on_disk = run.step // SAVED_STEP * SAVED_STEP
            if on_disk:
                time.sleep(_STEP_S)
            return 0 < on_disk <= memory.fields[0].value

        return Ending(holds)

    _pretrain(config, hosts, ending)


def start_again(messages: Messages, config: Path, hosts: Sequence[str]) -> None:
    """Resume, train one step, send the seconds of each part of that for each rank, and fail."""
    from megasdc.train import resume

    clock = Clock()
    for name, part in RESUME_PARTS.items():
        setattr(resume, name, clock.wrap(part, getattr(resume, name)))

    def ending(_: Sequence[Hook], parts: Any) -> Hook:
        def tell(run: Run) -> None:
            phases = {**parts.clock.phases}
            started_s = parts.clock.process_started_boot_s
            found = gather_objects((started_s, phases, dict(clock.parts), run.step - 1), run.host_group)
            messages.send(ranks=found)

        return Ending(lambda run: True, tell)

    _pretrain(config, hosts, ending)


def _pretrain(config: Path, hosts: Sequence[str], ending: Callable[[Sequence[Hook], Any], Hook]) -> None:
    """Train as the entry script does, with one more hook, whose ``EnoughError`` is no failure."""
    name_host(hosts[int(os.environ["RANK"])])

    def with_ending(build: Callable[[Any], list[Hook]], start: Any) -> list[Hook]:
        hooks = build(start)
        return [*hooks, ending(hooks, start)]

    train_with(config, with_ending, EnoughError)
