"""Prints what fine-tuning in a sweep came to: losses, loss spikes, and answers to multiple-choice questions.

python tools/finetune_table.py runs/sweeps/ma-finetune-cpu --questions prepared/identifiers/questions.jsonl

A row a run, and with several seeds a row a node: means and standard deviations over seeds. Spikes are those of
`megasdc study`, of the training loss in each step. Accuracy is that of `megasdc eval --choices` with the run's last
checkpoint, which a sweep keeps with `keep_checkpoints`; disagreement is the share of questions answered differently
than by the healthy run of the same cell and seed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megasdc.cli.app import stdout_to_stderr
from megasdc.common.errors import ConfigError
from megasdc.common.program import run_program
from megasdc.lab.studies.choices import Answers, Question, answer_questions, read_questions
from megasdc.lab.studies.tables import loss_spikes
from megasdc.lab.sweeps.outcome import DIVERGED, DONE
from megasdc.lab.sweeps.pei_metrics import relative_increase
from megasdc.lab.sweeps.results import SweepResults, read_sweep
from megasdc.lab.sweeps.sweep import CHECKPOINTS
from megasdc.lab.sweeps.sweep_file import HEALTHY


@dataclass(frozen=True)
class TunedRun:
    """One run; None: not known, or not asked.

    ``spikes``: steps with a loss spike; ``interval``: of the accuracy, 95 %; ``disagreement``: with the healthy run.
    """

    cell: str
    node: str
    seed: int
    status: str
    final_loss: float | None
    eval_loss: float | None
    spikes: list[int]
    accuracy: float | None = None
    interval: tuple[float, float] | None = None
    disagreement: float | None = None


def tuned_runs(results: SweepResults, questions: Sequence[Question], asked: Sequence[str] = ()) -> list[TunedRun]:
    """The finished runs of a sweep, a healthy one first in its cell; those that ended with weights answer questions.

    ``asked``: cells whose runs answer; empty: all. Equal runs answer once.
    """
    answers: dict[str, Answers] = {}
    found = []
    rows = sorted(results.rows, key=lambda row: row["node"] != HEALTHY)
    order = {cell["name"]: place for place, cell in enumerate(results.sweep["cells"])}
    for row in sorted(rows, key=lambda row: (order[row["cell"]], row["seed"])):
        run_id = row["run_id"]
        wanted = (not asked or row["cell"] in asked) and row["status"] in (DONE, DIVERGED)
        if questions and wanted and run_id not in answers:
            answers[run_id] = answer_questions(results.run_folder(run_id) / CHECKPOINTS, questions)
        found.append(_tuned(results, row, answers))
    return found


def _tuned(results: SweepResults, row: dict[str, Any], answers: dict[str, Answers]) -> TunedRun:
    values = results.series([row["run_id"]], ["train/loss"]).sort_by("step").to_pylist()
    spikes = loss_spikes([value["value"] if math.isfinite(value["value"]) else None for value in values])
    kept = {name: row[name] for name in ("cell", "node", "seed", "status", "final_loss", "eval_loss")}
    own = answers.get(row["run_id"])
    healthy = [one["run_id"] for one in results.rows if _place(one) == (row["cell"], HEALTHY, row["seed"])]
    other = answers.get(healthy[0]) if healthy else None
    share = None
    if own is not None and other is not None:
        share = own.differing(other) / len(own.answers)
    return TunedRun(
        **kept,
        spikes=[values[place]["step"] for place in spikes],
        accuracy=None if own is None else own.accuracy,
        interval=None if own is None else own.interval,
        disagreement=share,
    )


def _place(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["cell"], row["node"], row["seed"]


def render(runs: Sequence[TunedRun]) -> str:
    """A table in Markdown."""
    lines = [
        "| cell | node | seed | status | final loss | validation loss | spikes | accuracy (95 %) | disagreement |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in runs:
        accuracy = "-"
        if one.accuracy is not None and one.interval is not None:
            accuracy = f"{100 * one.accuracy:.1f} % ({100 * one.interval[0]:.1f} to {100 * one.interval[1]:.1f})"
        disagreement = "-" if one.disagreement is None else f"{100 * one.disagreement:.1f} %"
        losses = ["-" if loss is None else f"{loss:.4f}" for loss in (one.final_loss, one.eval_loss)]
        values = [one.cell, one.node, one.seed, one.status, *losses, len(one.spikes), accuracy, disagreement]
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def render_seeds(runs: Sequence[TunedRun]) -> str:
    """A table in Markdown with a row a cell and node, over the seeds with which it is done; empty with one seed alone.

    ``mean ± standard deviation`` of what is known of each seed; losses and accuracy are against the healthy run of the
    same seed, accuracy in points.
    """
    if len({one.seed for one in runs}) < 2:
        return ""
    healthy = {(one.cell, one.seed): one for one in runs if one.node == HEALTHY}
    lines = [
        "| cell | node | done | final loss | validation loss | spikes | accuracy | against healthy | disagreement |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, node in dict.fromkeys((one.cell, one.node) for one in runs):
        all_seeds = [one for one in runs if (one.cell, one.node) == (cell, node)]
        pairs = [
            (one, healthy[cell, one.seed]) for one in all_seeds if one.status == DONE and (cell, one.seed) in healthy
        ]
        values = [
            f"{len(pairs)} of {len(all_seeds)}",
            _spread([_rise(one.final_loss, base.final_loss) for one, base in pairs], "+.2f"),
            _spread([_rise(one.eval_loss, base.eval_loss) for one, base in pairs], "+.2f"),
            str(sum(len(one.spikes) for one, _ in pairs)),
            _spread([_percent(one.accuracy) for one, _ in pairs], ".1f"),
            _spread([_points(one.accuracy, base.accuracy) for one, base in pairs], "+.1f", unit=""),
            _spread([_percent(one.disagreement) for one, _ in pairs], ".1f"),
        ]
        lines.append(f"| {' | '.join([cell, node, *values])} |")
    return "\n".join(lines)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _rise(loss: float | None, healthy: float | None) -> float | None:
    return None if loss is None or healthy is None else 100 * relative_increase(loss, healthy)


def _points(accuracy: float | None, healthy: float | None) -> float | None:
    return None if accuracy is None or healthy is None else 100 * (accuracy - healthy)


def _spread(values: Sequence[float | None], digits: str, unit: str = " %") -> str:
    """``mean ± standard deviation``, the mean alone of one value, "-" of none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    deviation = f" ± {stdev(known):{digits.removeprefix('+')}}" if len(known) > 1 else ""
    return f"{fmean(known):{digits}}{deviation}{unit}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the sweep")
    parser.add_argument("--questions", type=Path, help="file of `megasdc eval --choices`; without, none are asked")
    parser.add_argument("--ask", action="append", default=[], metavar="CELL", help="ask this cell alone; repeatable")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    results = read_sweep(options.folder)
    cells = [cell["name"] for cell in results.sweep["cells"]]
    if unknown := [name for name in options.ask if name not in cells]:
        raise ConfigError([f"--ask: there is no cell {name!r}; there are {', '.join(cells)}." for name in unknown])
    questions = read_questions(options.questions) if options.questions else []
    with stdout_to_stderr():
        runs = tuned_runs(results, questions, options.ask)
    if options.json:
        print(json.dumps([asdict(one) for one in runs], indent=2))
    else:
        print("\n\n".join(filter(None, (render(runs), render_seeds(runs)))))


if __name__ == "__main__":
    run_program(main, "finetune_table")
