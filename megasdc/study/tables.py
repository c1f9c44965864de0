"""What does a study come to? The tables of Ma et al. 2025 from the lines of a study; pure, no torch.

Frequencies and severities: section 4.2 of the paper; noise-to-signal, worst over steps: section 4.3; parameter
difference, loss and disagreement: section 4.4. https://arxiv.org/abs/2502.12340
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megasdc.errors import DataError
from megasdc.model.kinds import ACTIVATION, CORE_ATTENTION, FC1, FC2, PROJECTION, QKV, kind_of
from megasdc.study.log import WHOLE, Line, read_study, torn_files
from megasdc.study.losses import LossRow, loss_rows

By = Literal["part", "kind", "submodule", "rank"]
_PARTS = {
    **dict.fromkeys((QKV, CORE_ATTENTION, PROJECTION), "attention"),
    **dict.fromkeys((FC1, ACTIVATION, FC2), "ffn"),
}


@dataclass
class MismatchRow:
    """What was compared and what differed of one replica, group of submodules and phase.

    ``name`` is what ``by`` groups by; ``rank`` is None unless that is the rank. ``severity_mean`` and ``severity_max``
    are None where no mismatch has a relative difference.
    """

    replica: int
    rank: int | None
    name: str
    phase: str
    results: int = 0
    elements: int = 0
    mismatches: int = 0
    severity_count: int = 0
    severity_sum: float = 0.0
    severity_max: float | None = None
    from_zero: int = 0
    non_finite: int = 0
    wrong_results: int = 0

    @property
    def frequency(self) -> float:
        """Mismatch frequency: elements that differ, of those compared."""
        return self.mismatches / self.elements if self.elements else 0.0

    @property
    def severity_mean(self) -> float | None:
        """Mismatch severity: mean relative difference, where it is not zero."""
        return self.severity_sum / self.severity_count if self.severity_count else None

    def as_dict(self) -> dict[str, Any]:
        """In plain values."""
        return {**asdict(self), "frequency": self.frequency, "severity_mean": self.severity_mean}


@dataclass(frozen=True)
class DistanceRow:
    """How far gradients or parameters of a submodule (``*``: the whole) were from the trusted ones.

    Args:
        replica: which.
        quantity: gradient or parameters.
        fqn: of the submodule.
        comparisons: how many.
        worst: the largest ||u - h|| / ||h||; None: none was finite.
        worst_step: its step.
        last: at the last comparison; None: it was not finite.
        not_finite: comparisons without a finite ratio.
    """

    replica: int
    quantity: str
    fqn: str
    comparisons: int
    worst: float | None
    worst_step: int | None
    last: float | None
    not_finite: int


@dataclass(frozen=True)
class BurstRow:
    """When a replica's results differed: a burst is a run of steps each of which has a mismatch."""

    replica: int
    first_step: int
    wrong_steps: int
    bursts: int
    longest_burst: int


@dataclass(frozen=True)
class StudySummary:
    """Everything that the tables of a study say."""

    run_dir: str
    mode: str
    replicas: int
    trusted: int
    steps: int
    mismatches: list[MismatchRow] = field(default_factory=list)
    bursts: list[BurstRow] = field(default_factory=list)
    distances: list[DistanceRow] = field(default_factory=list)
    losses: list[LossRow] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)
    torn: int = 0
    """Files that end within a line, which is left out."""

    def as_dict(self) -> dict[str, Any]:
        """In plain values."""
        return {**asdict(self), "mismatches": [row.as_dict() for row in self.mismatches]}


def summarize_study(run_dir: Any, by: By = "part") -> StudySummary:
    """Read a study and make its tables.

    Args:
        run_dir: folder of the launch.
        by: what rows of mismatches stand for: attention, FFN, ... together; kinds of submodules; single submodules; or
            the parts of each rank apart.

    Raises:
        DataError: the folder holds no study, no rank of it has begun, or a file of it is damaged.
    """
    starts = list(read_study(run_dir, "start"))
    if not starts:
        raise DataError(f"{run_dir}: no rank of the study has begun to compare yet; try again in a moment")
    losses = list(read_study(run_dir, "loss"))
    return StudySummary(
        run_dir=str(run_dir),
        mode=starts[-1]["mode"],
        replicas=starts[-1]["replicas"],
        trusted=starts[-1]["trusted"],
        steps=max((line["step"] for line in losses), default=0),
        mismatches=mismatch_rows(read_study(run_dir, "compared", "mismatch"), by),
        bursts=burst_rows(read_study(run_dir, "mismatch")),
        distances=distance_rows(read_study(run_dir, "gradient", "parameters")),
        losses=loss_rows(losses),
        evaluations=[
            {**line, "disagreement": line["disagreeing"] / line["tokens"], "accuracy": line["correct"] / line["tokens"]}
            for line in read_study(run_dir, "evaluation")
        ],
        torn=len(torn_files(run_dir)),
    )


def part_of(fqn: str) -> str:
    """attention, ffn, or the kind of a submodule that belongs to neither."""
    kind = kind_of(fqn)
    return _PARTS.get(kind, kind)


def mismatch_rows(lines: Iterable[Line], by: By = "part") -> list[MismatchRow]:
    """Frequency and severity by replica, group of submodules and phase.

    Args:
        lines: of kind compared and mismatch.
        by: see ``summarize_study``.
    """
    rows: dict[tuple[Any, ...], MismatchRow] = {}
    for line in lines:
        fqn = line["fqn"]
        name = {"submodule": fqn, "kind": kind_of(fqn)}.get(by, part_of(fqn))
        rank = line["rank"] if by == "rank" else None
        key = (line["replica"], rank, name, line["phase"])
        row = rows.setdefault(key, MismatchRow(*key))
        if line["kind"] == "compared":
            row.results += line["results"]
            row.elements += line["elements"]
            continue
        row.wrong_results += 1
        for counted in ("mismatches", "severity_count", "severity_sum", "from_zero", "non_finite"):
            setattr(row, counted, getattr(row, counted) + line[counted])
        if line["severity_count"]:
            row.severity_max = max(row.severity_max or 0.0, line["severity_max"])
    return list(rows.values())


def burst_rows(lines: Iterable[Line]) -> list[BurstRow]:
    """When each replica's results differed.

    Args:
        lines: of kind mismatch.
    """
    steps: dict[int, set[int]] = {}
    for line in lines:
        steps.setdefault(line["replica"], set()).add(line["step"])
    found = []
    for replica, wrong in sorted(steps.items()):
        starts = sorted(step for step in wrong if step - 1 not in wrong)
        ends = sorted(step for step in wrong if step + 1 not in wrong)
        longest = max(end - start + 1 for start, end in zip(starts, ends, strict=True))
        found.append(BurstRow(replica, starts[0], len(wrong), len(starts), longest))
    return found


def distance_rows(lines: Iterable[Line]) -> list[DistanceRow]:
    """Worst and last distance of every replica and submodule.

    Args:
        lines: of kind gradient and parameters, each replica's in the order of steps.
    """
    series: dict[tuple[int, str, str], list[tuple[int, float | None]]] = {}
    for line in lines:
        key = (line["replica"], line["kind"], line["fqn"])
        series.setdefault(key, []).append((line["step"], line["ratio"]))
    found = []
    for (replica, quantity, fqn), points in series.items():
        finite = [(ratio, -step) for step, ratio in points if ratio is not None]
        worst, negated = max(finite, default=(None, None))
        worst_step = None if negated is None else -negated
        missing = len(points) - len(finite)
        found.append(DistanceRow(replica, quantity, fqn, len(points), worst, worst_step, points[-1][1], missing))
    return found


def torn_note(summary: StudySummary) -> str | None:
    """That lines are left out, and why; None where none is."""
    if not summary.torn:
        return None
    count = "1 file ends" if summary.torn == 1 else f"{summary.torn:,} files end"
    return f"{count} within a line, which is left out: it is being written, or its process was killed"


def describe(summary: StudySummary) -> list[str]:
    """A study in a few sentences, one a replica that is not trusted."""
    lines = []
    for replica in range(summary.replicas):
        if replica == summary.trusted:
            continue
        parts = [f"replica {replica} against {summary.trusted}"]
        if rows := [row for row in summary.mismatches if row.replica == replica]:
            wrong, compared = sum(row.mismatches for row in rows), sum(row.elements for row in rows)
            parts.append(f"{wrong:,} of {compared:,} elements differ")
        for row in summary.distances:
            if row.replica == replica and row.fqn == WHOLE and row.worst is not None:
                parts.append(f"{row.quantity} at most {row.worst:.3g} apart (step {row.worst_step})")
        for loss in summary.losses:
            if loss.replica == replica and loss.largest_difference is not None:
                parts.append(f"loss at most {abs(loss.largest_difference):.3g} apart (step {loss.largest_step})")
        for found in summary.evaluations:
            if found["replica"] == replica:
                parts.append(f"predictions differ for {found['disagreement']:.3%} of tokens")
        lines.append("; ".join(parts))
    return lines
