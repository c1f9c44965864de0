"""Repeatability of a training that is not megasdc's own: two starts of its script, and what its guard has traced."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasdc.attached.settings import TRIAL_VARIABLE
from megasdc.common.errors import LaunchError, TraceError, error_of_rank
from megasdc.common.words import number_of
from megasdc.config.environment import set_deterministic_environment
from megasdc.config.guard import GuardSettings
from megasdc.ops.determinism_check.check import Progress, compare_two_runs, repeat_outcome
from megasdc.ops.launch.deepspeed_command import DeepSpeedCommand
from megasdc.ops.launch.front import launch_run
from megasdc.output.outcome import Outcome
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import TRACE_FOLDER, Trace, read_folder

OBSERVED = "results of submodules, their gradients, and parameters after each step"


def check_program(
    command: DeepSpeedCommand, settings: GuardSettings, steps: int, on_progress: Progress = lambda *_: None
) -> Outcome[Any]:
    """Start a script twice, let it take some steps each time, and compare what its guard has traced.

    The guard ends it after the last of these steps, and saves no checkpoint.

    Args:
        settings: of its guard, which the script gives to ``megasdc.attach``, too.

    Raises:
        MegasdcError: the script cannot be launched, has failed, or has attached no guard.
    """
    if settings.determinism.enabled:
        set_deterministic_environment(settings.determinism, os.environ)
    found = []
    for number, name in enumerate(("first run", "second run")):
        on_progress(name, number, 2)
        with tempfile.TemporaryDirectory(prefix="megasdc_repeat_") as folder:
            found.append(_run_once(command, settings, steps, folder))
    on_progress("compared", 2, 2)
    (first, layout), (second, _) = found
    observations = sum(map(len, first.values()))
    unset = "determinism.enabled is false: PyTorch and the GPU's libraries may choose what does not repeat"
    return repeat_outcome(
        [] if settings.determinism.enabled else [unset],
        [f"two runs of {number_of(steps, 'step')} of {command.script} on {number_of(layout.world_size, 'rank')}"],
        f"{observations} {OBSERVED}",
        compare_two_runs(first, second, layout),
        script=command.script,
        ranks=layout.world_size,
        steps=steps,
        is_deterministic=settings.determinism.enabled,
        observations=observations,
    )


def _run_once(
    command: DeepSpeedCommand, settings: GuardSettings, steps: int, folder: str
) -> tuple[Mapping[int, Trace], ParallelDims]:
    os.environ[TRIAL_VARIABLE] = json.dumps({"folder": folder, "steps": steps})
    try:
        result = launch_run(command.request(folder, settings), quiet=True)
    finally:
        del os.environ[TRIAL_VARIABLE]
    if result.exit_code:
        raise error_of_rank(result.exit_code)("\n".join(result.lines))
    ranks = sum(map(len, result.hosts.values()))
    try:
        found = read_folder(Path(folder) / TRACE_FOLDER)
    except TraceError as error:
        raise LaunchError(
            f"{command.script}: its {number_of(ranks, 'rank')} left no whole trace of {number_of(steps, 'step')}: "
            f"{error}; the script must "
            "attach a guard, `megasdc.attach(engine, ...)`, and take so many steps; on several hosts the folder of "
            "temporary files must be shared (TMPDIR)"
        ) from error
    taken = len({address.step for _, trace in found.values() for address in trace.addresses})
    if taken < steps:
        raise LaunchError(f"{command.script}: it took {taken} of the {steps} steps to compare; give --steps {taken}")
    return {rank: trace for rank, (_, trace) in found.items()}, ParallelDims(**found[0][0]["layout"])
