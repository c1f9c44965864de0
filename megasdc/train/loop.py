"""The training loop."""

from __future__ import annotations

from megasdc.engine.hooks import Run
from megasdc.train.process.isolation import IsolationError


def train(run: Run) -> None:
    """Run steps until the run is complete or has a reason to stop, from the step from which it continues.

    Raises:
        IsolationError: replicas are wrong, without which the others can go on; on all ranks.

    Collective: all ranks of the world.
    """
    hooks = tuple(run.hooks)
    try:
        for hook in hooks:
            hook.on_start(run)
        while not run.is_last_step:
            train_step(run)
        for hook in hooks:
            hook.on_end(run)
    except IsolationError:
        for hook in hooks:
            hook.before_isolation(run)
        raise
    finally:
        for hook in hooks:
            hook.close()


def train_step(run: Run) -> None:
    """Run one step of a started run, with all hooks before and after it.

    Collective: all ranks of the world.
    """
    for hook in tuple(run.hooks):  # a copy: an observer may be attached or removed meanwhile
        hook.before_step(run)
    result = run.engine.train_step(run.batches)
    run.step = result.step
    run.tokens += result.tokens
    run.samples += result.micro_batches * run.engine.micro_batch_size
    run.skipped_steps += result.skipped is not None
    if result.is_finite:
        run.finite_step = result.step
    for hook in tuple(run.hooks):
        hook.after_step(run, result)
