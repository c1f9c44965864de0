"""Ranks of the campaign of guards: many guarded trainings in the same processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.guard.cases import INTERVAL, RECORD, Case, Sizes
from tools.bench.rank import TIMEOUT_S, Messages
from tools.trainings.broken_unit import BrokenUnit
from tools.trainings.engines import (
    PIPELINE,
    TRAINER,
    Planted,
    deepspeed_config,
    llama_engine,
    llama_trainer,
    pipeline_engine,
    train,
)

WRONG = 64.0
"""Factor of what a unit computes: an error as small as rounding is taken for a property of a kernel."""


def run_cases(messages: Messages, cases: list[tuple[Case, str]]) -> None:
    """Train once for each case, with a guard that writes to its folder.

    Rank 0 sends the exit codes by rank and the number of audits.
    """
    import deepspeed

    from megasdc.parallel.collectives import gather_objects
    from megasdc.parallel.groups import init_process_group

    init_process_group(TIMEOUT_S)  # the ranks meet in a folder, which only this looks for
    deepspeed.init_distributed(dist_backend="gloo")
    for case, folder in cases:
        code, audits = _run(case, folder)
        messages.send(codes=gather_objects(code), audits=audits)


def _run(case: Case, folder: str) -> tuple[int, int]:
    """Exit code and number of audits of a training."""
    import torch.distributed as dist

    import megasdc

    here = case.planted if dist.get_rank() in case.wrong else None
    planted, unit = (here, nullcontext()) if case.sizes is None else (None, _unit(case.sizes, here))
    config = deepspeed_config(case.zero, case.precision)
    audit = {"interval": INTERVAL, "permuted": case.permuted, "enabled": not case.golden}
    settings: dict[str, Any] = {"logging": {"run_dir": folder}, "audit": audit}
    if case.golden:
        path = Path(folder).parent / f"{case.name}_{case.precision}.golden"
        settings["golden"] = {"path": str(path), "record": case.golden == RECORD, "interval": INTERVAL}
    if case.training == TRAINER:
        trainer = llama_trainer(config, planted, f"{folder}_trainer", case.steps)
        attached = megasdc.attach(trainer, settings)
        with unit:
            code = _code(trainer.train)
        attached.close()
        trainer.deepspeed.destroy()
        return code, attached.guard.audits
    if case.training == PIPELINE:
        engine = pipeline_engine(config, case.stages, planted)
    else:
        engine = llama_engine(config, planted)
    guard = megasdc.attach(engine, settings)
    with unit:
        code = _code(partial(train, engine, case.steps, guard.dims.dp_rank))
    guard.close()
    engine.destroy()
    return code, guard.audits


def _unit(sizes: Sizes, planted: Planted | None) -> AbstractContextManager[object]:
    """A unit that is wrong at a drawn place, on the rank where it is planted."""
    if planted is None:
        return nullcontext()
    chance = random.Random(planted.seed)
    return BrokenUnit(sizes, (chance.randrange(1 << 10), chance.randrange(1 << 10)), WRONG)


def _code(training: Callable[[], Any]) -> int:
    """Exit code of a process that ends so."""
    try:
        training()
    except SystemExit as error:
        return int(str(error.code))
    return 0
