"""Coverage of a configuration: the checks of each phase of a step, and when they run.

Exact checks compare bits. Checks that only warn, or detect only NaN and Inf, are listed but do not count as exact.

Steps and checkpoints until a check sees a fault that stays, from when the check looks at which part of a step.

A fault stays at one place - micro-batch, block, element or product - from some step on; each first step and each place
are equally likely. Steps are counted from the first that uses what is wrong to the one that looks at it, both
included: 1 means at once. Checkpoints are those that were saved with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD
from megasdc.config.contradictions import asks_golden
from megasdc.config.detection import EXTRA, AuditSection, SdcSection
from megasdc.config.hooks import AFTER_NORM, LOCAL, HookSpec
from megasdc.config.sections import CheckpointSection, DeterminismSection
from megasdc.sdc.cost import MOST_EVERY, Cadence


class CheckSections(Protocol):
    """The sections that decide what is checked: of a run, or of a guard in the words of a run."""

    @property
    def audit(self) -> AuditSection: ...  # noqa: D102

    @property
    def sdc(self) -> SdcSection: ...  # noqa: D102

    @property
    def determinism(self) -> DeterminismSection: ...  # noqa: D102

    @property
    def checkpoint(self) -> CheckpointSection: ...  # noqa: D102

    @property
    def optimizer_hooks(self) -> list[HookSpec]: ...  # noqa: D102


@dataclass(frozen=True)
class Rotation:
    """Periodic looks of a check at its places.

    Args:
        looks: steps of a period in which it looks at the first place, ascending, from 0 to ``period - 1``.
        period: number of steps after which all repeats.
        apart: steps from a look at one place to the look at the next; all of them are within a period. 0: one place.
        ahead: whether the places of a step are also looked at before a save of the step before.
    """

    looks: tuple[int, ...] = (0,)
    period: int = 1
    apart: int = 0
    ahead: bool = False

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Step of each look at the first place, with the number of steps since the look before."""
        before = (self.looks[-1] - self.period, *self.looks)
        return [(look, look - last) for last, look in zip(before, self.looks, strict=False)]


EVERY_STEP = Rotation()


@dataclass(frozen=True)
class Latency:
    """Time until a fault that stays is seen.

    Args:
        check: name of the check that sees it.
        steps: largest number of steps.
        mean_steps: mean number of steps, over first steps and places.
        checkpoints: largest number of checkpoints that hold the fault; None: the run saves at its end alone.
        mean_checkpoints: mean number of these checkpoints.
        at_most: whether the numbers are bounds, since a budget decides how often the check looks.
    """

    check: str
    steps: int
    mean_steps: float
    checkpoints: int | None
    mean_checkpoints: float | None
    at_most: bool = False


def in_turn(cadence: Cadence, places: int, *, first: int = 0, ahead: bool = False) -> Rotation:
    """Rotation of a check that looks at one of ``places`` places in each step that looks."""
    return Rotation((first,), places * cadence.every, cadence.every, ahead)


def of_micro_batches(cadence: Cadence, of: int) -> Rotation:
    """Rotation of a check that looks at some of a step's ``of`` micro-batches, by the cadence."""
    shared = math.gcd(of, cadence.micro_batches)
    places, looked = of // shared, cadence.micro_batches // shared
    turns = (turn for turn in range(places) if -turn * looked % places < looked)
    return Rotation(tuple(turn * cadence.every for turn in turns), places * cadence.every, cadence.every)


def of_audits(audit: AuditSection, save_interval: int) -> Rotation:
    """Rotation of audits that are due by the number of the step, at their largest interval."""
    after_saves = bool(audit.verify_checkpoints and save_interval)
    interval = audit.most_interval
    period = math.lcm(interval, save_interval) if after_saves else interval
    due = set(range(0, period, interval))
    due |= {(save + 1) % period for save in range(0, period, save_interval)} if after_saves else set()
    return Rotation(tuple(sorted(due)), period)


def latency(check: str, rotation: Rotation, save_interval: int, *, at_most: bool = False) -> Latency:
    """Latency of a check.

    Args:
        save_interval: steps between checkpoints; 0: none but at the end.
        at_most: whether the check may look more often; checkpoints are then those of the worst places of looks between
            saves.
    """
    gaps = rotation.gaps
    steps = max(gap for _, gap in gaps)
    mean = sum(gap * (gap + 1) / 2 for _, gap in gaps) / rotation.period
    if not save_interval:
        return Latency(check, steps, mean, None, None, at_most)
    shared = save_interval if at_most else math.gcd(rotation.period, save_interval)
    shifts = 1 if at_most else shared // math.gcd(rotation.apart or shared, shared)
    most, total = 0, 0.0
    for shift in range(shifts):
        for look, gap in gaps:
            # Saves are ``nearest`` steps before a look, or a multiple of ``shared`` more, all equally often.
            nearest = 1 if at_most else (look + shift * rotation.apart - rotation.ahead) % shared or shared
            if nearest < gap:
                saves = (gap - 1 - nearest) // shared + 1
                most = max(most, (gap - 1 - nearest) // save_interval + 1)
                total += saves * (gap - nearest) - shared * saves * (saves - 1) / 2
    return Latency(check, steps, mean, most, total * shared / save_interval / shifts / rotation.period, at_most=at_most)


NOTHING = "-"
AUDIT, GOLDEN = "audit", "golden trace"
"""Names of checks in a latency, besides those of every step."""
ROWS = "rows of a product summed"
_NORM = "NaN and Inf (norm)"
TOKENS, PLACE = "tokens", "place"
"""Rows of the model's inputs, and of the place in the data from which they are read."""
NORM, CLIPPING, STATE, COPY = "norm", "clipping", "state", "copy"
"""Rows of the gradient's norm, its clip factors, masters and moments between steps, and the gathered parameters."""
SETTINGS = "settings"
"""Row of the optimizer's settings: hyperparameters and step counts."""
_STEP = (NORM, CLIPPING, SETTINGS, STATE, UPDATE, COPY, PARAMETER)
_SLICES = {
    REDUCED_GRAD: "a slice added again",
    CLIPPING: "a slice clipped again",
    STATE: "a slice's own copy",
    UPDATE: "a slice updated again",
}
_PARTLY = (REDUCED_GRAD, NORM, CLIPPING, UPDATE)
"""Rows in which an error may pass each time: smaller than rounding, or not in the slice of the step."""
_ONCE = (TOKENS, STATE, COPY)
"""Rows of values that a step uses up if it does not look at them, so that no later look sees an error."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a run that decide what can be compared.

    Args:
        replicas: data-parallel size.
        tensor: tensor-parallel size.
        micro_batches: number of micro-batches of a step on each replica.
        covered: number of micro-batches that the always-on checks look at; None: as many as the budget allows.
        every: number of steps from one such look to the next.
        recomputes: whether activations are recomputed.
        pipeline: number of stages.
        within: texts, by phase, on slices that are compared within a tolerance since a step of the run; and of
            ``AUDIT`` and ``GOLDEN`` what is left of them: ``NOTHING``, or at how many positions replicas are compared.
        slices: number of slices of the optimizer, on the rank that has most; None: not known before a start.
        products: number of products of linear layers, on the rank that has most; None: not known before a start.
        sets: number of sets of blocks of the gradient, of which another rank adds one again in turn, on the rank that
            has most; None: not known before a start.
        equal_norms: whether norms of all ranks have equal bits, so that they and the factors are compared.
        attached: whether the training is not our own: its data are not known, and its settings are compared only in
            steps that look at a slice.
        offloads: whether the optimizer's state lies in the host's memory, so that gradients are not added again.
    """

    replicas: int
    tensor: int
    micro_batches: int
    covered: int | None
    recomputes: bool
    every: int = 1
    pipeline: int = 1
    within: Mapping[str, str] = field(default_factory=dict)
    slices: int | None = None
    products: int | None = None
    sets: int | None = None
    offloads: bool = False
    equal_norms: bool = True
    attached: bool = False

    @property
    def cadence(self) -> Cadence:
        """Cadence of looks at results; where the budget decides, the rarest that it may choose."""
        return Cadence(1, MOST_EVERY) if self.covered is None else Cadence(self.covered, self.every)

    @property
    def share(self) -> str:
        """Text on the micro-batches that the always-on checks cover."""
        if self.covered is None:
            return f"some of {self.micro_batches}"
        return f"{self.covered} of {self.micro_batches}" + (f" every {self.every} steps" if self.every > 1 else "")

    @property
    def blocks(self) -> str:
        """Text on the blocks of the optimizer's shards at which a step looks."""
        if self.covered is None:
            return "some blocks"
        looks = math.ceil(self.micro_batches / self.covered)
        share = "all blocks" if looks == 1 else f"1 of {looks} blocks"
        return share + (f" every {self.every} steps" if self.every > 1 else "")

    @property
    def looks(self) -> str:
        """Text on the steps that look at all; empty: every step."""
        if self.covered is None:
            return ", in some steps"
        return f", every {self.every} steps" if self.every > 1 else ""

    @property
    def is_whole(self) -> bool:
        """Whether the always-on checks cover every micro-batch of every step."""
        return self.covered == self.micro_batches and self.every == 1


@dataclass(frozen=True)
class Covered:
    """Checks of one phase.

    ``exact``: bits are compared in every micro-batch of every step ("always"), in some ("sometimes"), or "never".
    ``latencies``: of each check whose looks are known, in the order of the cells.
    """

    phase: str
    every_step: str
    audit: str
    golden: str
    exact: str
    latencies: tuple[Latency, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the phase's row in the table."""
        steps = _latency_text([(one, one.steps, one.mean_steps) for one in self.latencies])
        saves = _latency_text([(one, one.checkpoints, one.mean_checkpoints) for one in self.latencies])
        return self.phase, self.every_step, self.audit, self.golden, steps, saves


def coverage_rows(sections: CheckSections, shape: Shape) -> list[Covered]:
    """Checks of each phase of a step."""
    computed = (FORWARD, *([RECOMPUTE] if shape.recomputes else []), BACKWARD, WEIGHT_GRAD, REDUCED_GRAD)
    return [_row(phase, sections, shape) for phase in (PLACE, TOKENS, *computed, *_STEP)]


class _Check(NamedTuple):
    """A check of every step: its text, whether it compares bits, and its rotation, None: not known."""

    text: str
    exact: bool
    rotation: Rotation | None = EVERY_STEP


def _latency_text(numbers: Sequence[tuple[Latency, int | None, float | None]]) -> str:
    """Text of the largest and mean numbers of each check; once where all checks of every step have the same."""
    texts: dict[str, None] = {}
    for one, most, mean in numbers:
        if most is not None and mean is not None:
            name = f"{one.check} " if one.check in (AUDIT, GOLDEN) else ""
            texts[f"{name}{'<= ' if one.at_most else ''}{most} / {mean:.4g}"] = None
    return "; ".join(texts) or NOTHING


def _row(phase: str, sections: CheckSections, shape: Shape) -> Covered:
    every = _every_step(phase, sections, shape)
    in_audit = sections.audit.enabled and shape.replicas > 1
    audit = golden = NOTHING
    if phase in (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD):
        where = shape.within.get(AUDIT, "")
        others = [f"replicas {where}".rstrip()] if in_audit and where != NOTHING else []
        whom = others + ["itself elsewhere"] * (sections.audit.enabled and sections.audit.permutes(shape.replicas))
        which = "an extra one" if sections.audit.micro_batch == EXTRA else f"1 of {shape.micro_batches}"
        audit = f"{' and '.join(whom)}, {which}" if whom else NOTHING
        golden = (
            shape.within.get(GOLDEN, "its own workload") if asks_golden(sections.sdc, sections.determinism) else NOTHING
        )
    elif phase == PARAMETER and in_audit:
        audit = "replicas"
    in_each = (PARAMETER,) if shape.attached else (PARAMETER, SETTINGS)
    whole = phase == PLACE or (shape.replicas > 1 if phase in in_each else shape.is_whole)
    if any(one.exact for one in every):
        partly = phase in _PARTLY or (phase == STATE and not sections.sdc.always_on.chain)
        exact = "always" if whole and not partly else "sometimes"
    else:
        exact = "never" if (audit, golden) == (NOTHING, NOTHING) else "sometimes"
    texts = "; ".join(one.text for one in every) or NOTHING
    return Covered(phase, texts, audit, golden, exact, tuple(_latencies(every, audit, golden, sections, shape)))


def _latencies(
    every: Sequence[_Check], audit: str, golden: str, sections: CheckSections, shape: Shape
) -> Iterator[Latency]:
    """Latencies of a row's checks, those whose looks follow from the number of the step."""
    saves, interval = sections.checkpoint.interval, sections.sdc.golden_interval
    for text, _, rotation in every:
        if rotation is not None:
            decided = shape.covered is None and rotation != EVERY_STEP
            yield latency(text, rotation, saves, at_most=decided)
    if audit != NOTHING:
        bounded = sections.audit.most_interval > sections.audit.interval
        yield latency(AUDIT, of_audits(sections.audit, saves), saves, at_most=bounded)
    if golden != NOTHING and interval is not None:
        yield latency(GOLDEN, Rotation(period=interval), saves)


def _every_step(phase: str, sections: CheckSections, shape: Shape) -> list[_Check]:
    """Checks of a phase in every step."""
    section, cadence = sections.sdc.always_on, shape.cadence
    covered = of_micro_batches(cadence, shape.micro_batches)
    found: list[_Check] = []
    if phase in (FORWARD, RECOMPUTE) and section.enabled and shape.recomputes and section.recompute is not False:
        found.append(_Check(f"forward = recompute, {shape.share}", True, covered))
    if phase == PLACE and section.enabled and not shape.attached:
        found.append(_Check("what follows from step and decisions", True))
    if phase == SETTINGS and section.enabled and shape.replicas > 1 and (section.slice_elements or not shape.attached):
        looks = in_turn(cadence, 1, first=cadence.every // 2) if shape.attached else EVERY_STEP
        text = f"replicas, hyperparameters and step counts{shape.looks if shape.attached else ''}"
        found.append(_Check(text, True, looks))
    if phase == PARAMETER and section.enabled and section.parameters:
        found += [_Check("replicas", True)] * (shape.replicas > 1)
        found += [_Check("copies of tensor ranks", True)] * (shape.tensor > 1)
    if phase in (FORWARD, BACKWARD) and section.enabled and section.finite:
        found.append(_Check(f"NaN and Inf, {shape.share}", False, covered))
    if section.enabled and section.rows and phase in (FORWARD, BACKWARD, WEIGHT_GRAD):
        places = None if shape.products is None else shape.products * shape.micro_batches
        found.append(_Check(ROWS, False, None if places is None else in_turn(cadence, places)))
    found += _of_chain(phase, sections, shape)
    bounded = {LOCAL: REDUCED_GRAD, AFTER_NORM: CLIPPING}
    unseen = [bounded.get(spec.where) for spec in sections.optimizer_hooks]
    if section.enabled and section.slice_elements and phase in _SLICES and phase not in unseen:
        within = shape.within.get(phase)
        due = None if shape.slices is None else in_turn(cadence, shape.slices, first=cadence.every // 2)
        found.append(_Check(_SLICES[phase] + (f", {within}" if within else ""), within is None, due))
    if phase in (WEIGHT_GRAD, REDUCED_GRAD):
        found.append(_Check(_NORM, False))
    return found


def _of_chain(phase: str, sections: CheckSections, shape: Shape) -> list[_Check]:
    """Checks of tokens, and of the links from the reduced gradient to the parameters."""
    section, ranks = sections.sdc.always_on, shape.replicas * shape.tensor * shape.pipeline
    cadence = shape.cadence
    if not section.enabled:
        return []
    if phase == TOKENS and section.tokens:
        return [_Check(f"the file, {shape.share}", True, of_micro_batches(cadence, shape.micro_batches))]
    if not section.chain:
        return []
    others = [_Check(f"{'norms' if phase == NORM else 'factors'} of all ranks", True)]
    others = others if ranks > 1 and shape.equal_norms else []
    sets = 1 if section.coverage == "all" else shape.sets
    which = "all blocks" if sets == 1 else "a set of blocks" if sets is None else f"1 of {sets} sets of blocks"
    whom = "by another rank" if ranks > 1 else "in another order"
    again = None if sets is None else in_turn(cadence, sets)
    looks = in_turn(cadence, 1)
    added = [
        _Check(f"sum of all blocks within rounding{shape.looks}", False, looks),
        _Check(f"{which} added again {whom}{shape.looks}", False, again),
    ]
    blocks = in_turn(cadence, math.ceil(shape.micro_batches / cadence.micro_batches), ahead=True)
    checks = {
        NORM: others + ([] if shape.offloads else added),
        CLIPPING: [*others, _Check("the rank's norm within rounding", False)],
        STATE: [_Check(f"own digests, {shape.blocks}", True, blocks)],
        COPY: [_Check(f"the owner's masters, {shape.blocks}", True, blocks)],
    }
    return checks.get(phase, [])


def table_head(sections: CheckSections, replicas: int, within: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Column headings: the check, and when it runs; ``replicas`` and ``within`` as in ``Shape``."""
    audit, sdc = sections.audit, sections.sdc
    audited = "audit: off"
    if audit.enabled:
        audited = (
            f"audit, every {audit.intervals} steps"
            if replicas > 1 or audit.permutes(replicas)
            else "audit: one replica"
        )
    golden = "golden trace: off"
    if asks_golden(sections.sdc, sections.determinism):
        when = ["at each start"] * sdc.golden_at_start
        when += [f"every {sdc.golden_interval} steps"] * (sdc.golden_interval is not None)
        golden = f"{GOLDEN}, {' and '.join(when)}" if GOLDEN not in (within or {}) else "golden trace: does not fit"
    return "phase", "every step", audited, golden, "steps until seen", "checkpoints until seen"


def coverage_notes(rows: list[Covered]) -> list[str]:
    """Conclusions from the table, a sentence each."""
    texts = {
        "always": "Compared bit by bit in every step",
        "sometimes": "Compared bit by bit only in some steps or micro-batches, or only in the golden workload",
        "summed": "Checked by sums of rows alone, which find what is larger than rounding",
        "never": "Never compared bit by bit, so that a wrong value there stays undetected unless NaN or Inf",
    }
    notes = []
    for exact, text in texts.items():
        of_row = (
            (row.phase, "summed" if row.exact == "never" and ROWS in row.every_step else row.exact) for row in rows
        )
        phases = [phase for phase, one in of_row if one == exact]
        notes += [f"{text}: {', '.join(phases)}."] * bool(phases)
    if once := [row.phase for row in rows if row.phase in _ONCE and row.exact == "sometimes"]:
        notes.append(f"A change that happens once is seen only if its step looks at its part: {', '.join(once)}.")
    if any("recompute" in row.every_step for row in rows):
        notes.append("A rank compared with its own recomputation hides a fault that repeats itself.")
    if any("elsewhere" in row.audit for row in rows):
        notes.append("A rank compared with itself elsewhere hides a fault that moves with the values.")
    return notes


def render_coverage(sections: CheckSections, shape: Shape, *, markdown: bool = False) -> list[str]:
    """The table and its conclusions, as lines.

    Args:
        markdown: whether the table is in Markdown; else in columns for a terminal.
    """
    rows = coverage_rows(sections, shape)
    table = [table_head(sections, shape.replicas, shape.within), *(row.cells for row in rows)]
    if markdown:
        lines = [f"| {' | '.join(cells)} |" for cells in table]
        lines.insert(1, "|---" * len(table[0]) + "|")
        return [*lines, "", " ".join(coverage_notes(rows))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table
    ]
    return lines + coverage_notes(rows)
