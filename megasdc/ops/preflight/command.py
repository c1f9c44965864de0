"""``megasdc preflight``: makes the checks one after the other, and gives one verdict."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn

from megasdc.common.errors import MegasdcError, StorageError
from megasdc.common.program import OnProgress
from megasdc.ops.preflight.inputs import (
    check_configuration,
    check_cost,
    check_data,
    check_golden,
    check_hosts,
    check_resume,
    check_spares,
    check_steps,
)
from megasdc.ops.preflight.job import Job, prepared
from megasdc.ops.preflight.request import PreflightRequest
from megasdc.ops.preflight.result import CheckStatus, PreflightFinding, failed, not_done, preflight_outcome
from megasdc.ops.preflight.storage import check_storage
from megasdc.output.outcome import Outcome

SIGNAL_CODES = 128


@dataclass(frozen=True)
class Check:
    """A check.

    Args:
        run: makes it; a ``MegasdcError`` or an ``OSError`` is a failure of it.
        after: checks that must not have failed before.
        uses: the check whose files it reads; empty: none.
    """

    run: Callable[[Job], PreflightFinding]
    after: tuple[str, ...] = ("configuration",)
    uses: str = ""


CHECKS = {
    "configuration": Check(check_configuration),
    "data": Check(check_data),
    "hosts": Check(check_hosts),
    "storage": Check(check_storage),
    "steps": Check(check_steps, after=("configuration", "data", "hosts")),
    "resume": Check(check_resume, uses="steps"),
    "cost": Check(check_cost, uses="steps"),
    "golden": Check(check_golden),
    "spares": Check(check_spares),
}
"""By name, in their order."""
SKIPPABLE = tuple(CHECKS)[1:]
"""Names of checks that can be left out."""


def run_preflight(
    request: PreflightRequest, on_progress: OnProgress = lambda what, done, total: None
) -> Outcome[PreflightFinding]:
    """Make all checks; a check that fails ends none but those that need it.

    SIGTERM and Ctrl-C end it, and what it has started; what it wrote is removed then, too.

    Args:
        on_progress: called with what is done, how much of it, and of how much.
    """
    results: list[PreflightFinding] = []

    def add_result(name: str, finding: PreflightFinding, began: float) -> None:
        results.append(replace(finding, name=name, seconds=time.monotonic() - began))

    job: Job | None = None
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with ExitStack() as stack:
            began = time.monotonic()
            try:
                job = stack.enter_context(prepared(request, on_progress))
            except MegasdcError as error:
                add_result("configuration", failed(error), began)
            for name, check in CHECKS.items():
                if name not in [one.name for one in results]:
                    began = time.monotonic()
                    add_result(name, _make(name, check, job, results), began)
                on_progress("checks", len(results), len(CHECKS))
    finally:
        signal.signal(signal.SIGTERM, before)
    folders = () if job is None or not request.keep else (job.folder, job.checkpoints)
    return preflight_outcome(results, [str(one) for one in folders if one is not None])


def _make(name: str, check: Check, job: Job | None, results: Sequence[PreflightFinding]) -> PreflightFinding:
    """Make a check, unless it is left out or lacks what it needs."""
    status = {one.name: one.status for one in results}
    if lacking := [one for one in check.after if status.get(one) is CheckStatus.FAILED]:
        return not_done(f"{' and '.join(lacking)} failed; repair that first")
    assert job is not None, "every check comes after that of the configuration"
    if name in job.request.skip:
        return not_done("left out by --skip")
    if check.uses and status[check.uses] not in (CheckStatus.OK, CheckStatus.WARNING):
        return not_done(f"it needs what the check {check.uses} writes, which was not done or failed")
    try:
        return check.run(job)
    except MegasdcError as error:
        return failed(error)
    except OSError as error:  # a disk that ends, or a share that goes, while a check uses it
        place, why = error.filename or job.storage, error.strerror or str(error)
        return failed(StorageError(f"{place}: {why}; see that the disk answers and has room, and start again"))


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(SIGNAL_CODES + number)
