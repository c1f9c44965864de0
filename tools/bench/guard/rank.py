"""Ranks of the campaign of guards: many guarded trainings in the same processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.bench.guard.cases import INTERVAL, Case
from tools.bench.rank import Messages


def run_cases(messages: Messages, cases: list[tuple[Case, str]]) -> None:
    """Train once for each case, with a guard that writes to its folder.

    Rank 0 sends the exit codes by rank and the number of audits.
    """
    import torch.distributed as dist

    import megasdc
    from megasdc.parallel.collectives import gather_objects
    from tools.bench.guard.trainings import PIPELINE, deepspeed_config, llama_engine, pipeline_engine, train

    import deepspeed  # isort: skip

    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    for case, folder in cases:
        planted = case.planted if case.planted is not None and case.planted.rank == rank else None
        config = deepspeed_config(case.zero, case.precision)
        if case.training == PIPELINE:
            engine = pipeline_engine(config, case.stages, planted)
        else:
            engine = llama_engine(config, planted)
        settings: dict[str, Any] = {"logging": {"run_dir": folder}, "audit": {"interval": INTERVAL}}
        guard = megasdc.attach(engine, settings)
        try:
            train(engine, case.steps, guard.dims.dp_rank)
            code = 0
        except SystemExit as error:
            code = int(str(error.code))
        guard.close()
        engine.destroy()
        messages.send(codes=gather_objects(code), audits=guard.audits)
        Path(folder).mkdir(exist_ok=True)
