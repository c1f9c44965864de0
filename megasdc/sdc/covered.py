"""Coverage of a configuration: the checks of each phase of a step, and when they run.

Exact checks compare bits. Checks that only warn, or detect only NaN and Inf, are listed but do not count as exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megasdc.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD
from megasdc.config import MegasdcSection
from megasdc.config.problems.detection import asks_golden
from megasdc.config.sections.detection import EXTRA

NOTHING = "-"
_NORM = "NaN and Inf (norm)"
SETTINGS = "settings"
"""Row of what the optimizer steps with: hyperparameters and step counts."""
_SLICES = {REDUCED_GRAD: "a slice added again", UPDATE: "a slice updated again"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a run that decide what can be compared.

    Args:
        replicas: data-parallel size.
        tensor: tensor-parallel size.
        micro_batches: of a step on each replica.
        covered: micro-batches that the always-on checks look at; None: as many as the budget allows.
        every: steps from one such look to the next.
        recomputes: whether activations are recomputed.
        within: what is said, by phase, of slices that are compared within a tolerance since a step of the run.
    """

    replicas: int
    tensor: int
    micro_batches: int
    covered: int | None
    recomputes: bool
    every: int = 1
    within: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> str:
        """The micro-batches that the always-on checks cover, as text."""
        if self.covered is None:
            return f"some of {self.micro_batches}"
        return f"{self.covered} of {self.micro_batches}" + (f" every {self.every} steps" if self.every > 1 else "")

    @property
    def is_whole(self) -> bool:
        """Whether that is every micro-batch of every step."""
        return self.covered == self.micro_batches and self.every == 1


@dataclass(frozen=True)
class Covered:
    """Checks of one phase.

    ``exact``: bits are compared in every micro-batch of every step ("always"), in some ("sometimes"), or "never".
    """

    phase: str
    every_step: str
    audit: str
    golden: str
    exact: str

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        return self.phase, self.every_step, self.audit, self.golden


def coverage_rows(sections: MegasdcSection, shape: Shape) -> list[Covered]:
    """Checks of each phase of a step."""
    rows = [_row(phase, sections, shape) for phase in (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD)]
    if not shape.recomputes:
        del rows[1]
    return [*rows, *(_row(phase, sections, shape) for phase in (REDUCED_GRAD, SETTINGS, UPDATE, PARAMETER))]


def _row(phase: str, sections: MegasdcSection, shape: Shape) -> Covered:
    every = _every_step(phase, sections, shape)
    in_audit = sections.audit.enabled and shape.replicas > 1
    audit = golden = NOTHING
    if phase in (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD):
        whom = ["replicas"] * in_audit + ["itself elsewhere"] * (sections.audit.enabled and sections.audit.permuted)
        which = "an extra one" if sections.audit.micro_batch == EXTRA else f"1 of {shape.micro_batches}"
        audit = f"{' and '.join(whom)}, {which}" if whom else NOTHING
        golden = "its own workload" if asks_golden(sections) else NOTHING
    elif phase == PARAMETER and in_audit:
        audit = "replicas"
    whole = shape.replicas > 1 if phase in (PARAMETER, SETTINGS) else shape.is_whole
    if any(exact for _, exact in every):
        exact = "always" if whole and phase not in _SLICES else "sometimes"
    else:
        exact = "never" if (audit, golden) == (NOTHING, NOTHING) else "sometimes"
    return Covered(phase, "; ".join(text for text, _ in every) or NOTHING, audit, golden, exact)


def _every_step(phase: str, sections: MegasdcSection, shape: Shape) -> list[tuple[str, bool]]:
    """Checks of a phase in every step, and whether each compares bits."""
    section = sections.sdc.always_on
    found = []
    if phase in (FORWARD, RECOMPUTE) and section.enabled and shape.recomputes and section.recompute is not False:
        found.append((f"forward = recompute, {shape.share}", True))
    if phase == SETTINGS and section.enabled and shape.replicas > 1:
        found.append(("replicas, hyperparameters and step counts", True))
    if phase == PARAMETER and section.enabled and section.parameters:
        found += [("replicas", True)] * (shape.replicas > 1) + [("copies of tensor ranks", True)] * (shape.tensor > 1)
    if phase in (FORWARD, BACKWARD) and section.enabled and section.finite:
        found.append((f"NaN and Inf, {shape.share}", False))
    if section.enabled and section.rows and phase in (FORWARD, BACKWARD, WEIGHT_GRAD):
        found.append(("rows of a product summed", False))
    if section.enabled and section.slice_elements and phase in _SLICES:
        within = shape.within.get(phase)
        found.append((_SLICES[phase] + (f", {within}" if within else ""), within is None))
    if phase in (WEIGHT_GRAD, REDUCED_GRAD):
        found.append((_NORM, False))
    if section.enabled and section.toleranced:
        warns = {WEIGHT_GRAD: "features warn", REDUCED_GRAD: "sums warn", UPDATE: "a slice warns"}
        found += [(warns[phase], False)] if phase in warns else []
    return found


def table_head(sections: MegasdcSection) -> tuple[str, ...]:
    """Column headings: the check, and when it runs."""
    audit, sdc = sections.audit, sections.sdc
    audited = f"audit, every {audit.interval} steps" if audit.enabled else "audit: off"
    golden = "golden trace: off"
    if asks_golden(sections):
        when = ["at each start"] * sdc.golden_at_start
        when += [f"every {sdc.golden_interval} steps"] * (sdc.golden_interval is not None)
        golden = f"golden trace, {' and '.join(when)}"
    return "phase", "every step", audited, golden


def coverage_notes(rows: list[Covered]) -> list[str]:
    """Conclusions from the table, a sentence each."""
    texts = {
        "always": "Compared bit by bit in every step",
        "sometimes": "Compared bit by bit only in some steps or micro-batches, or only in the golden workload",
        "never": "Never compared bit by bit, so that a wrong value there stays undetected unless NaN, Inf or unusual",
    }
    notes = []
    for exact, text in texts.items():
        phases = [row.phase for row in rows if row.exact == exact]
        notes += [f"{text}: {', '.join(phases)}."] * bool(phases)
    if any("recompute" in row.every_step for row in rows):
        notes.append("A rank compared with its own recomputation hides a fault that repeats itself.")
    if any("elsewhere" in row.audit for row in rows):
        notes.append("A rank compared with itself elsewhere hides a fault that moves with the values.")
    return notes


def render_coverage(sections: MegasdcSection, shape: Shape, *, markdown: bool = False) -> list[str]:
    """The table and its conclusions, as lines.

    Args:
        markdown: as a Markdown table; else as columns for a terminal.
    """
    rows = coverage_rows(sections, shape)
    table = [table_head(sections), *(row.cells for row in rows)]
    if markdown:
        lines = [f"| {' | '.join(cells)} |" for cells in table]
        lines.insert(1, "|---" * len(table[0]) + "|")
        return [*lines, "", " ".join(coverage_notes(rows))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table
    ]
    return lines + coverage_notes(rows)
