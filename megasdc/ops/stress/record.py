"""Recording of golden values: a stress test of this host, whose results are written if it is healthy."""

from __future__ import annotations

import datetime
import socket
from dataclasses import replace
from pathlib import Path

from megasdc.common.errors import CorruptionError
from megasdc.ops.golden.record import record_golden_trace as record_trace
from megasdc.ops.stress.golden import GoldenFolder, save_products
from megasdc.ops.stress.host_verdict import HEALTHY, HostVerdict
from megasdc.ops.stress.result import stress_outcome
from megasdc.ops.stress.run import Progress, StressPlan, run_rounds
from megasdc.ops.stress.state import GEMM, TRAINING
from megasdc.ops.stress.training import small_run
from megasdc.output.outcome import Outcome
from megasdc.train.detection.golden_key import workload_of


def record_stress(
    plan: StressPlan, folder: Path, on_progress: Progress = lambda done, total: None
) -> tuple[Outcome[HostVerdict], list[Path]]:
    """Tests this host without golden values, and writes its results as golden values; returns outcome and files.

    Args:
        plan: of this host alone.
        folder: for the files; those of the same device and versions are replaced.
        on_progress: see ``Progress``.

    Raises:
        CorruptionError: the host is not healthy; nothing is written.
        StorageError: a file cannot be written.
        TraceError: the training run does not repeat in fresh processes.
    """
    (state,), _, interrupted = run_rounds(replace(plan, golden=GoldenFolder()), on_progress)
    outcome = stress_outcome([state], interrupted=interrupted)
    (verdict,) = outcome.verdicts
    if verdict.status != HEALTHY or interrupted:
        why = "; ".join(reason.text for reason in verdict.reasons) or "the test did not finish"
        raise CorruptionError(f"nothing is recorded, this host is {verdict.status}: {why}")
    files = []
    if GEMM in plan.only:
        now = datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
        said = {"host": socket.gethostname(), "time": now, "rounds": state.rounds}
        files.append(save_products(folder, state.key, state.products["0"], said))
    if TRAINING in plan.only:
        files.append(folder / f"{'accelerator' if state.on_accelerator else 'processor'}.golden")
        record_trace(workload_of({"config": small_run(state.on_accelerator)}), files[-1])
    return outcome, files
