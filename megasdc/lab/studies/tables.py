"""Tables of a study, those of Ma et al. 2025, from the lines of its log; no torch.

Frequencies and severities: section 4.2 of the paper; noise-to-signal, worst over steps: section 4.3; parameter
difference, loss and disagreement: section 4.4. https://arxiv.org/abs/2502.12340

Losses of replicas: differences to the trusted one, and spikes. Pure, no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megasdc.common.errors import DataError
from megasdc.model.kinds import ACTIVATION, CORE_ATTENTION, FC1, FC2, PROJECTION, QKV, submodule_kind
from megasdc.ops.run_folder.study_log import WHOLE, Line, read_study, torn_files

SPIKE_WINDOW, SPIKE_DEVIATIONS = 20, 6.0
_MAD_TO_STD = 1.4826


@dataclass(frozen=True)
class LossRow:
    """The losses of one replica; a difference is its loss minus the trusted replica's."""

    replica: int
    steps: int
    last: float | None
    largest_difference: float | None
    largest_step: int | None
    last_difference: float | None
    not_finite: int
    spikes: list[int]


def loss_rows(lines: Iterable[Line]) -> list[LossRow]:
    """Losses, their difference to the trusted replica's, and spikes; each replica's lines are in the order of steps."""
    series: dict[int, list[Line]] = {}
    for line in lines:
        series.setdefault(line["replica"], []).append(line)
    found = []
    for replica, points in sorted(series.items()):
        apart = {
            line["step"]: line["loss"] - line["trusted_loss"]
            for line in points
            if line["loss"] is not None and line["trusted_loss"] is not None
        }
        largest = max(apart, key=lambda step: abs(apart[step]), default=None)
        places = loss_spikes([line["loss"] for line in points])
        found.append(
            LossRow(
                replica=replica,
                steps=len(points),
                last=points[-1]["loss"],
                largest_difference=None if largest is None else apart[largest],
                largest_step=largest,
                last_difference=apart.get(points[-1]["step"]),
                not_finite=sum(line["loss"] is None for line in points),
                spikes=[points[place]["step"] for place in places],
            )
        )
    return found


def loss_spikes(
    losses: Sequence[float | None], window: int = SPIKE_WINDOW, deviations: float = SPIKE_DEVIATIONS
) -> list[int]:
    """Indices of losses far above those just before them; one loss per step, None: not finite.

    A loss is a spike if it is more than ``deviations`` standard deviations above the median of the ``window`` finite
    losses before it, or if it is not finite. The standard deviation is estimated as 1.4826 times the median absolute
    deviation, at least 0.1 % of the median. A finite loss with fewer losses before it is no spike.
    """
    found, before = [], []  # type: list[int], list[float]
    for place, loss in enumerate(losses):
        if loss is None:
            found.append(place)
            continue
        if len(before) >= window:
            recent = before[-window:]
            middle = statistics.median(recent)
            spread = _MAD_TO_STD * statistics.median(abs(one - middle) for one in recent)
            if loss > middle + deviations * max(spread, 1e-3 * abs(middle)):
                found.append(place)
        before.append(loss)
    return found


By = Literal["part", "kind", "submodule", "rank"]
_PARTS = {
    **dict.fromkeys((QKV, CORE_ATTENTION, PROJECTION), "attention"),
    **dict.fromkeys((FC1, ACTIVATION, FC2), "ffn"),
}


@dataclass
class MismatchRow:
    """Comparisons and mismatches of one replica, group of submodules and phase.

    ``name`` is the group; ``rank`` is None unless rows are grouped by rank. ``severity_mean`` and ``severity_max`` are
    None where no mismatch has a relative difference.
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
        """Mismatch severity: mean of the relative differences that are not zero."""
        return self.severity_sum / self.severity_count if self.severity_count else None

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "frequency": self.frequency, "severity_mean": self.severity_mean}


@dataclass(frozen=True)
class DistanceRow:
    """Distance of a submodule's (``*``: the whole model's) gradients or parameters from the trusted ones.

    Args:
        quantity: gradient or parameters.
        comparisons: number of comparisons.
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
    """Steps in which a replica's results differed; a burst is a sequence of consecutive such steps."""

    replica: int
    first_step: int
    wrong_steps: int
    bursts: int
    longest_burst: int


@dataclass(frozen=True)
class StudySummary:
    """The tables of a study."""

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
    """Number of files with an incomplete last line, which is ignored."""

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "mismatches": [row.as_dict() for row in self.mismatches]}


def summarize_study(run_dir: Any, by: By = "part") -> StudySummary:
    """Reads a study and makes its tables.

    Args:
        run_dir: folder of the launch.
        by: grouping of mismatches: parts (attention, FFN, ...), kinds of submodules, single submodules, or parts of
            each rank.

    Raises:
        DataError: the folder holds no study, no rank of it has started, or a file of it is damaged.
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
    """Part of the model: attention, ffn, or the kind of a submodule that belongs to neither."""
    kind = submodule_kind(fqn)
    return _PARTS.get(kind, kind)


def mismatch_rows(lines: Iterable[Line], by: By = "part") -> list[MismatchRow]:
    """Frequency and severity by replica, group of submodules and phase, from lines of kind compared and mismatch.

    Args:
        by: see ``summarize_study``.
    """
    rows: dict[tuple[Any, ...], MismatchRow] = {}
    for line in lines:
        fqn = line["fqn"]
        name = {"submodule": fqn, "kind": submodule_kind(fqn)}.get(by, part_of(fqn))
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
    """Bursts of mismatches of each replica, from lines of kind mismatch."""
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
    """Worst and last distance of every replica and submodule, from lines of kind gradient and parameters.

    Each replica's lines are in the order of steps.
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
    """Note on incomplete lines; None where there are none."""
    if not summary.torn:
        return None
    count = "1 file ends" if summary.torn == 1 else f"{summary.torn:,} files end"
    return f"{count} within a line, which is skipped: it is being written, or its process was killed"


def describe_study(summary: StudySummary) -> list[str]:
    """A study in a few sentences, one for each replica that is not trusted."""
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
