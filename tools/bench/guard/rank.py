"""Ranks of the campaign of guards: many guarded trainings in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.guard.cases import INTERVAL, RECORD, Case
from tools.bench.guard.trainings import (
    PIPELINE,
    TRAINER,
    deepspeed_config,
    llama_engine,
    llama_trainer,
    pipeline_engine,
    train,
)
from tools.bench.rank import Messages


def run_cases(messages: Messages, cases: list[tuple[Case, str]]) -> None:
    """Train once for each case, with a guard that writes to its folder.

    Rank 0 sends the exit codes by rank and the number of audits.
    """
    import deepspeed

    from megasdc.parallel.collectives import gather_objects

    deepspeed.init_distributed(dist_backend="gloo")
    for case, folder in cases:
        code, audits = _run(case, folder)
        messages.send(codes=gather_objects(code), audits=audits)


def _run(case: Case, folder: str) -> tuple[int, int]:
    """Exit code and number of audits of a training."""
    import torch.distributed as dist

    import megasdc

    planted = case.planted if dist.get_rank() in case.wrong else None
    config = deepspeed_config(case.zero, case.precision)
    settings: dict[str, Any] = {"logging": {"run_dir": folder}, "audit": {"interval": INTERVAL}}
    if case.golden:
        path = Path(folder).parent / f"{case.name}_{case.precision}.golden"
        settings["audit"]["enabled"] = False
        settings["golden"] = {"path": str(path), "record": case.golden == RECORD, "interval": INTERVAL}
    if case.training == TRAINER:
        trainer = llama_trainer(config, planted, f"{folder}_trainer", case.steps)
        attached = megasdc.attach(trainer, settings)
        code = _code(trainer.train)
        attached.close()
        trainer.deepspeed.destroy()
        return code, attached.guard.audits
    if case.training == PIPELINE:
        engine = pipeline_engine(config, case.stages, planted)
    else:
        engine = llama_engine(config, planted)
    guard = megasdc.attach(engine, settings)
    code = _code(partial(train, engine, case.steps, guard.dims.dp_rank))
    guard.close()
    engine.destroy()
    return code, guard.audits


def _code(training: Callable[[], Any]) -> int:
    """Exit code of a process that ends so."""
    try:
        training()
    except SystemExit as error:
        return int(str(error.code))
    return 0
