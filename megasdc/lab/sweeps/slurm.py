"""A sweep as a SLURM array job, one run per task; runs that others await come first."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from megasdc.lab.sweeps.plan import Plan

SCRIPT, SUBMIT = "sweep.sbatch", "submit.sh"

_SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output="{out}/slurm-%A_%a.log"
#
# One run of the sweep a task; submit.sh gives the range of tasks. Add what your cluster needs: partition, time, memory,
# --gpus-per-node={ranks} on hosts with GPUs, --cpus-per-task. A task that was cut off is submitted again as it is: it
# goes on from its checkpoint, and one that has finished does nothing. Paths count from the folder of submission.
set -euo pipefail
cd {folder}
exec {command} --task "$SLURM_ARRAY_TASK_ID"
"""

_SUBMIT = """#!/usr/bin/env bash
# Submits {count} runs: {donors} that others start from, then the rest, of which none awaits a later one,
# then the tables.
# Further options go to every sbatch: bash {submit} --partition=gpu --time=04:00:00
set -euo pipefail
cd {folder}
after=()
{stages}
sbatch --parsable "$@" --nodes=1 --ntasks=1 --dependency=afterany:"$job" --output={out}/slurm-tables.log \\
    --wrap {gather}
"""

_STAGE = """job=$(sbatch --parsable "$@" "${{after[@]}}" --array={first}-{last}%{at_once} {script})
job=${{job%%;*}}
after=(--dependency=afterany:"$job")"""


def write_job(plan: Plan, arguments: list[str], out: Path, at_once: int) -> Path:
    """Writes the array job and the script that submits it, to be run with bash; returns the script.

    A task's number is the index of its run. ``arguments``: of ``megasdc sweep``, without ``--slurm``; ``out``: the
    sweep's folder, shared by all hosts; ``at_once``: maximum of concurrent tasks.
    """
    command = shlex.join([sys.executable, "-m", "megasdc", "sweep", *arguments])
    runs = list(plan.runs.values())
    donors = sum(run.donor for run in runs)
    folder, quoted = shlex.quote(str(Path.cwd())), shlex.quote(str(out))
    script = _SCRIPT.format(name=plan.sweep.name, out=out, ranks=plan.sweep.ranks, folder=folder, command=command)
    (out / SCRIPT).write_text(script, encoding="utf-8")
    free = sum(run.condition is None for run in runs)
    parts = ((0, donors - 1), (donors, free - 1), (free, len(runs) - 1))
    ranges = [part for part in parts if part[0] <= part[1]]
    at = shlex.quote(str(out / SCRIPT))
    stages = "\n".join(_STAGE.format(first=first, last=last, at_once=at_once, script=at) for first, last in ranges)
    submit = out / SUBMIT
    text = _SUBMIT.format(
        count=len(runs),
        donors=donors,
        submit=submit,
        folder=folder,
        stages=stages,
        out=quoted,
        gather=shlex.quote(f"cd {folder} && {command} --table"),
    )
    submit.write_text(text, encoding="utf-8")
    return submit
