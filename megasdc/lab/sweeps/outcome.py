"""Outcome of a run: status, reason and losses, from the files that the run wrote; stored atomically in one file.

A run is finished when its ``result.json`` exists. NaN, divergence and failure are results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megasdc.common.durable import parse_json, write_durably
from megasdc.common.errors import ERRORS_BY_EXIT_CODE, NonFiniteError, PeerError, StorageError
from megasdc.lab.sweeps.run_process import LOG_FOLDER
from megasdc.metrics.writer import read_metrics

RESULT_FILE = "result.json"
DONE, DIVERGED, NAN, FAILED = "done", "diverged", "nan", "failed"
STATUSES = (DONE, DIVERGED, NAN, FAILED)
_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run.

    Args:
        status: done; diverged: see ``diverged_why``; nan: most of its last losses are not finite, or it skipped too
            many steps in a row; failed: it ended with another error or too early.
        reason: why it is not done, else empty.
        final_loss: mean training loss over the last steps, nats; None where it is not finite or there is none.
        eval_loss: validation loss at the end; None likewise.
        steps: the last step that was taken.
        skipped_steps: steps that the optimizer did not take.
        seconds: of the process that finished it, its start included.
        exit_codes: of its ranks; empty where none was started.
        judged_by: values of the ``Yardstick``.
    """

    run_id: str
    status: str
    reason: str
    final_loss: float | None
    eval_loss: float | None
    steps: int
    skipped_steps: int
    seconds: float
    exit_codes: tuple[int, ...]
    judged_by: tuple[float | None, ...]


@dataclass(frozen=True)
class Yardstick:
    """Criteria by which a run is judged: the final loss is the mean over ``final_steps``, the last steps.

    A run has diverged with a final loss more than the share ``diverged_rise`` above the lowest mean over as many steps,
    or above ``entropy``, nats, that of a model that knows token frequencies alone; None: not used, runs are too short.
    """

    final_steps: int
    diverged_rise: float
    entropy: float | None

    @property
    def values(self) -> tuple[float | None, ...]:
        """The values that an outcome stores."""
        return self.final_steps, self.diverged_rise, self.entropy


def judge_run(
    run_id: str, folder: Path, measured: Path, codes: Sequence[int], last_step: int, seconds: float, by: Yardstick
) -> RunOutcome:
    """Determines a run's outcome from the files that it wrote.

    ``measured``: folder of its losses, see ``measured_folder``; ``codes``: exit codes of its ranks; ``last_step``: that
    it was to reach.
    """
    rows = read_metrics(measured)
    losses = [(row["step"], _number(row["train/loss"])) for row in rows if "train/loss" in row]
    steps = losses[-1][0] if losses else 0
    final = final_mean(losses, by.final_steps)
    found = _status(folder, codes, steps, last_step, losses, final, by)
    evals = [row["eval/loss"] for row in rows if "eval/loss" in row]
    skipped = [row["train/skipped_steps"] for row in rows if "train/skipped_steps" in row]
    return RunOutcome(
        run_id=run_id,
        status=found[0],
        reason=found[1],
        final_loss=final if math.isfinite(final) else None,
        eval_loss=evals[-1] if evals else None,
        steps=steps,
        skipped_steps=skipped[-1] if skipped else 0,
        seconds=round(seconds, 3),
        exit_codes=tuple(codes),
        judged_by=by.values,
    )


def _status(
    folder: Path,
    codes: Sequence[int],
    steps: int,
    last_step: int,
    losses: Sequence[tuple[int, float]],
    final: float,
    by: Yardstick,
) -> tuple[str, str]:
    code = _first_failure(codes)
    if code == NonFiniteError.exit_code:
        return NAN, _last_error(folder, codes) or "too many steps in a row were skipped"
    if code:
        kind = ERRORS_BY_EXIT_CODE.get(code)
        name = kind.__name__ if kind else f"exit code {code}"
        return FAILED, f"{name}: {_last_error(folder, codes) or 'nothing was printed'}"
    if steps < last_step:
        return FAILED, f"it stopped after step {steps} of {last_step}"
    if not math.isfinite(final):
        return NAN, f"most losses of the last {by.final_steps} steps are not numbers"
    why = diverged_why(losses, final, by)
    return (DIVERGED, why) if why else (DONE, "")


def final_mean(losses: Sequence[tuple[int, float]], final_steps: int) -> float:
    """Mean over the last steps without losses that are not finite: the optimizer skips such a step.

    ``losses``: step and mean loss since the line before, in order. NaN where less than half of them are finite.
    """
    last = [loss for step, loss in losses if step > losses[-1][0] - final_steps]
    finite = [loss for loss in last if math.isfinite(loss)]
    return fmean(finite) if last and 2 * len(finite) >= len(last) else math.nan


def diverged_why(losses: Sequence[tuple[int, float]], final: float, by: Yardstick) -> str | None:
    """The reason why a run with a finite final loss counts as diverged; None: it does not.

    Its final loss is above that of token frequencies, or by more than ``diverged_rise`` above the lowest mean over as
    many successive steps: the loss has risen and not recovered. A window with NaN is ignored.
    """
    if by.entropy is not None and final > by.entropy:
        return f"the final loss {final:.4f} is above {by.entropy:.4f}, that of token frequencies"
    values = [loss for _, loss in losses]
    interval = losses[1][0] - losses[0][0] if len(losses) > 1 else 1
    width = max(1, by.final_steps // interval)
    means = [fmean(values[at : at + width]) for at in range(len(values) - width + 1)]
    lowest = min((mean for mean in means if math.isfinite(mean)), default=final)
    if final > lowest * (1 + by.diverged_rise):
        return f"the final loss {final:.4f} is {final / lowest - 1:.1%} above {lowest:.4f}, which it had reached"
    return None


def write_outcome(folder: Path, outcome: RunOutcome) -> None:
    """Writes ``result.json``, whole."""
    write_durably(folder / RESULT_FILE, json.dumps(asdict(outcome), indent=2) + "\n")


def read_outcome(folder: Path) -> RunOutcome | None:
    """The outcome of a finished run; None where it is not finished.

    Raises:
        StorageError: the file is damaged or of another version.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        lists = {name: tuple(found[name]) for name in ("exit_codes", "judged_by")}
        return RunOutcome(**{**found, **lists})
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} is no result of this version ({error!r}); remove {folder} to run it anew"
        ) from error


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _first_failure(codes: Sequence[int]) -> int:
    """First exit code of a rank that failed by itself; else of one that lost its peer or was killed; 0: none failed."""
    failed = [code for code in codes if code]
    alone = [code for code in failed if code > 0 and code != PeerError.exit_code]
    return (alone or failed or [0])[0]


def _last_error(folder: Path, codes: Sequence[int]) -> str:
    """The last line that a failed rank logged as an error, without its prefix."""
    rank = codes.index(_first_failure(codes))
    path = folder / LOG_FOLDER / f"rank_{rank}.log"
    data = path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if path.exists() else ""
    lines = data.splitlines()
    errors = [line.partition("] E ")[2] for line in lines if "] E " in line]
    if errors and errors[-1] != "unexpected error":
        return errors[-1][:400]
    return next((line for line in reversed(lines) if line.strip()), "")[:400]
