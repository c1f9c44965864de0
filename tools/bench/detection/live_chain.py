"""Faults in the links from a micro-batch's tokens to the gathered parameters: whole runs, scored by how they end.

Each drill is a run of the training program with all checks that look at every step, and one fault, or two in one step,
of one element, group and rank; or with a preset alone, and faults in what a micro-batch computes besides. A run that
its checks end is started again without the fault, as on another host. What counts is the end: every loss, the places in
the data and every bit of the last checkpoint against a run without faults. A fault after which nothing differs is
harmless, and counted apart. Runs without faults must raise no alarm.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, REDUCED_GRAD, UPDATE, WEIGHT_GRAD
from megasdc.common.errors import CorruptionError, MegasdcError, NonFiniteError
from megasdc.config.faults import (
    CLIPPED_GRAD,
    COLLECTIVE,
    COPY,
    HYPERPARAMETER,
    NORM,
    OPTIMIZER_STATE,
    PLACE,
    STATE_AT_REST,
    TOKENS,
)
from megasdc.config.sections import STANDARD
from megasdc.events import read_events
from megasdc.train.detection.finding_policy import STATE_TIERS
from megasdc.train.detection.findings import EVENT_KIND
from tools.bench.campaign import Campaign, CampaignLog, Layout, layout_text, tables
from tools.bench.checkpoints.recovery_checks import read_end, why_different
from tools.bench.isolation.config import write_config
from tools.bench.rank import Progress, scratch_folder
from tools.bench.result import Report
from tools.bench.small.drill import prepare_texts
from tools.bench.small.launches import AT_A_TIME, launch

CLEAN = "clean"
ALWAYS_COMPARED = "Compared bit by bit in every step"
"""How the coverage of a run begins the list of rows in which nothing passes."""
STEPS, FIRST_STEPS = 8, (2, 3, 4, 5)
"""Steps of a run, and those in which a fault comes first."""
PRESET_STEPS, PRESET_FIRST_STEPS = 60, tuple(range(2, 41))
"""The same of runs with a preset alone: so many that each part is looked at while there is room for it."""
TWO = 0.25
"""Share of drills with two faults in one step."""
TIMEOUT_S = 30.0
ZERO_FP32, BF16, ZERO_BF16 = "fp32", "bf16", "bf16, summed in bf16"
PRECISIONS: dict[str, dict[str, Any]] = {
    ZERO_FP32: {},
    BF16: {"bf16": {"enabled": True}},
    ZERO_BF16: {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
}
"""Types: DeepSpeedZeroOptimizer, BF16_Optimizer, and DeepSpeedZeroOptimizer in bf16."""
ONCE, ALWAYS, SOMETIMES = "once", "persistent", "intermittent"
PERSISTENCES: dict[str, dict[str, Any]] = {ONCE: {}, ALWAYS: {"same_elements": True}, SOMETIMES: {"probability": 0.5}}
OWNED, WHOLE = STATE_AT_REST, COLLECTIVE
"""Phases of the addresses that a run without faults is asked for: what a rank owns, and all that it holds."""
Addresses = Mapping[str, Sequence[tuple[int, str, str, bool]]]
"""By phase (rank, submodule, slot, whether it is in the group without weight decay)."""
Spec = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """Ranks, type and the addresses of a layout, for draws."""

    layout: Layout
    addresses: Addresses
    chance: random.Random

    @property
    def ranks(self) -> int:
        """Ranks of the layout."""
        return math.prod(self.layout)

    def rank(self) -> int:
        """A random rank."""
        return self.chance.randrange(self.ranks)

    def one_of(self, phase: str, second: bool | None = None) -> tuple[int, str, str, bool]:
        """A random address; ``second``: whether of the group without weight decay, None: of either."""
        return self.chance.choice([one for one in self.addresses[phase] if second in (None, one[3])])

    def bit(self) -> Spec:
        """One bit of one element, of those that are not rounded away at once, or a wrong factor."""
        chosen = self.chance.choice(("mantissa", "mantissa", "sign", "scale"))
        if chosen == "scale":
            return {"kind": "scale", "factor": self.chance.choice((0.5, 1.5, 4.0))}
        return {"bits": chosen}

    def factor(self) -> Spec:
        """A wrong number: a little, or much."""
        return {"kind": "scale", "factor": self.chance.choice((0.5, 1.001, 2.0, 8.0))}


def _owned(phase: str) -> Callable[[Cell], list[Spec]]:
    def draw(cell: Cell) -> list[Spec]:
        rank, fqn, slot, _ = cell.one_of(OWNED)
        slot = slot if phase in (OPTIMIZER_STATE, UPDATE, STATE_AT_REST) else slot.partition(".")[0]
        return [{"phase": phase, "rank": rank, "submodule": fqn, "slot": slot, **cell.bit()}]

    return draw


def _whole(phase: str) -> Callable[[Cell], list[Spec]]:
    def draw(cell: Cell) -> list[Spec]:
        rank, fqn, slot, _ = cell.one_of(WHOLE)
        return [{"phase": phase, "rank": rank, "submodule": fqn, "slot": slot, **cell.bit()}]

    return draw


def _groups(cell: Cell) -> list[Spec]:
    """The same rank's state of both groups."""
    kind, rank = cell.bit(), cell.one_of(OWNED, second=True)[0]
    found = []
    for second in (False, True):
        fits = [one for one in cell.addresses[OWNED] if (one[0], one[3]) == (rank, second)]
        _, fqn, slot, _ = cell.chance.choice(fits or [cell.one_of(OWNED, second=second)])
        found.append({"phase": STATE_AT_REST, "rank": rank, "submodule": fqn, "slot": slot, **kind})
    return found


def _alike(cell: Cell) -> list[Spec]:
    """One element of a parameter on all replicas."""
    rank, fqn, slot, _ = cell.one_of(WHOLE)
    tensor = {"tensor_rank": rank % cell.layout[0]}
    where = {"pattern": "indices", "indices": [cell.chance.randrange(16)], "bits": [cell.chance.randrange(9, 15)]}
    return [{"phase": PARAMETER, "submodule": fqn, "slot": slot, **tensor, **where}]


def _number(phase: str, *slots: str) -> Callable[[Cell], list[Spec]]:
    def draw(cell: Cell) -> list[Spec]:
        return [{"phase": phase, "rank": cell.rank(), "slot": cell.chance.choice(slots), **cell.factor()}]

    return draw


def _adds(cell: Cell) -> list[Spec]:
    """A rank that adds squares wrongly each time: its part of the norm, and the blocks with which that is compared."""
    common = {"phase": NORM, "rank": cell.rank(), **cell.factor()}
    return [{**common, "slot": "part"}, {**common, "slot": "blocks", "elements": 1_000_000}]


def _beta(cell: Cell) -> list[Spec]:
    slots = [f"{group}.{name}" for group in (0, 1) for name in ("beta1", "beta2")]
    slot, factor = cell.chance.choice(slots), cell.chance.choice((0.5, 0.9, 0.999))
    return [{"phase": HYPERPARAMETER, "rank": cell.rank(), "slot": slot, "kind": "scale", "factor": factor}]


def _eps(cell: Cell) -> list[Spec]:
    slot, factor = cell.chance.choice(("0.eps", "1.eps")), cell.chance.choice((1e3, 1e5))
    return [{"phase": HYPERPARAMETER, "rank": cell.rank(), "slot": slot, "kind": "scale", "factor": factor}]


def _tokens(cell: Cell) -> list[Spec]:
    tensor, pipeline, data = cell.layout
    rank = cell.rank()
    stage = rank // (tensor * data)
    if 0 < stage < pipeline - 1:
        rank, stage = rank % (tensor * data), 0
    slots = ["tokens"] * (stage == 0) + ["labels"] * (stage == pipeline - 1)
    more = {"slot": cell.chance.choice(slots), "bits": [cell.chance.randrange(7)], "micro_batches": [0]}
    return [{"phase": TOKENS, "rank": rank, **more}]


def _place(cell: Cell) -> list[Spec]:
    return [{"phase": PLACE, "rank": cell.rank(), "bits": [cell.chance.randrange(4)]}]


def _result(phase: str) -> Callable[[Cell], list[Spec]]:
    def draw(cell: Cell) -> list[Spec]:
        rank, fqn, slot, _ = cell.one_of(phase)
        return [{"phase": phase, "rank": rank, "submodule": fqn, "slot": slot, **cell.bit()}]

    return draw


RESULTS = (FORWARD, BACKWARD, WEIGHT_GRAD)
"""Kinds of faults in what a micro-batch computes, of runs with a preset."""
KINDS: dict[str, Callable[[Cell], list[Spec]]] = {
    "tokens": _tokens,
    "place": _place,
    "sum": _whole(COLLECTIVE),
    "reduced": _owned(REDUCED_GRAD),
    "part": _number(NORM, "part"),
    "adds": _adds,
    "norm": _number(NORM, "total"),
    "factor": _number(NORM, "factor"),
    "clipped": _owned(CLIPPED_GRAD),
    "lr": _number(HYPERPARAMETER, "0.lr", "1.lr"),
    "beta": _beta,
    "eps": _eps,
    "decay": _number(HYPERPARAMETER, "0.weight_decay"),
    "count": _number(HYPERPARAMETER, "0.step", "1.step"),
    "state": _owned(OPTIMIZER_STATE),
    "update": _owned(UPDATE),
    "rest": _owned(STATE_AT_REST),
    "groups": _groups,
    "copy": _owned(COPY),
    "parameter": _whole(PARAMETER),
    "alike": _alike,
}
"""Kinds of faults: what a rank reads, the chain from its gradient to the parameters, in the order of a step."""
DRAWS = {**{phase: _result(phase) for phase in RESULTS}, **KINDS}
ROWS = {
    **{name: name for name in (*RESULTS, "tokens", "place", "norm", "copy", "parameter", "update")},
    **dict.fromkeys(("sum", "reduced"), REDUCED_GRAD),
    **dict.fromkeys(("factor", "clipped"), "clipping"),
    **dict.fromkeys(("lr", "beta", "eps", "decay", "count"), "settings"),
    **dict.fromkeys(("state", "rest", "groups"), "state"),
    **dict.fromkeys(("part", "adds"), "norm"),
    "alike": "copy",
}
"""Row of the run's table of coverage that each kind is in."""


@dataclass(frozen=True)
class Planned:
    """A drill before its run.

    Args:
        kinds: of its faults, two where there are two in one step.
        specs: as in a configuration.
        owners: kind that each spec is of.
    """

    number: int
    layout: Layout
    precision: str
    kinds: tuple[str, ...]
    persistence: str
    specs: tuple[Spec, ...]
    owners: tuple[str, ...]


WITHOUT = -1
"""Number of the run without faults of a layout and type."""


@dataclass(frozen=True)
class ChainDrill:
    """What came of a drill.

    Args:
        number: of the drill, by which it is drawn; ``WITHOUT``.
        changed: ranks on which a fault has changed a bit.
        found: tiers that found something, in the first launch.
        named: ranks that were named, in the same.
        codes: of the ranks in the first launch; empty: a rank did not come back.
        differs: what differs at the end from a run without faults.
        told: whether the run's coverage says that what has passed may pass: faults that changed a bit in a step of
            which nothing was found, and that the start after it went on from.
        late: whether something was found, and a fault had passed so.
        steps: in a run without faults, its steps.
    """

    number: int
    layout: Layout
    precision: str
    kinds: tuple[str, ...]
    persistence: str
    specs: tuple[Spec, ...]
    changed: tuple[int, ...]
    found: tuple[str, ...]
    named: tuple[int, ...]
    codes: tuple[int, ...]
    differs: tuple[str, ...]
    told: bool = False
    late: bool = False
    steps: int = STEPS

    @property
    def outcome(self) -> str:
        """One of ``OUTCOMES``."""
        if self.kinds == (CLEAN,):
            return ALARM if self.found or any(self.codes) or self.differs else RIGHT
        if not self.codes or not set(self.codes) <= {0, CorruptionError.exit_code, NonFiniteError.exit_code}:
            return BROKEN
        if set(self.named) - set(self.changed):
            return ACCUSED
        if self.found and self.differs:  # a fault that comes again may pass first, as told, and be seen later
            return TOLD if self.told and self.late else WRONG_END
        if self.found:
            return NAMED if self.named else UNNAMED
        if not self.changed:
            return NO_BIT
        if not self.differs:
            return HARMLESS
        return TOLD if self.told else MISSED

    @property
    def in_run(self) -> bool:
        """Whether it was found, and the run went on by itself to the right end."""
        return self.outcome in (NAMED, UNNAMED) and not any(self.codes)


RIGHT, ALARM = "right", "false alarm"
NO_BIT, HARMLESS, NAMED, UNNAMED = "no bit", "harmless", "found, named", "found, unnamed"
TOLD, MISSED, WRONG_END, ACCUSED, BROKEN = "not covered", "missed", "wrong end", "wrong name", "another end"
OUTCOMES = (NO_BIT, HARMLESS, NAMED, UNNAMED, TOLD, MISSED, WRONG_END, ACCUSED, BROKEN)
"""Of drills with faults; the last four, and an alarm without a fault, are failures."""
MORE = ("in the run", "found later")
"""Columns behind them: of those found, and of those not covered."""
FAILURES = (MISSED, WRONG_END, ACCUSED, BROKEN, ALARM)


@dataclass(frozen=True)
class ChainResult:
    """All drills."""

    also = ("passed", "by_kind", "by_layout", "clean_steps", "clean_alarms")

    drills: Sequence[ChainDrill] = field(repr=False)

    @property
    def failed(self) -> list[ChainDrill]:
        """Drills that did not come out as they have to."""
        return [one for one in self.drills if one.outcome in FAILURES]

    @property
    def passed(self) -> bool:
        """Whether all came out as they have to, and something was found."""
        return not self.failed and any(one.found for one in self.drills if one.changed)

    @property
    def faulty(self) -> list[ChainDrill]:
        """Drills with faults."""
        return [one for one in self.drills if one.kinds != (CLEAN,)]

    @property
    def by_kind(self) -> dict[str, dict[str, int]]:
        """Counts of outcomes by kind."""
        return _counts(self.faulty, _kind)

    @property
    def by_layout(self) -> dict[str, dict[str, int]]:
        """Counts of outcomes by layout and type."""
        return _counts(self.faulty, _cell)

    @property
    def clean_steps(self) -> dict[str, int]:
        """Steps without a fault by layout."""
        found: Counter[str] = Counter()
        for one in self.drills:
            found[layout_text(one)] += one.steps * (one.kinds == (CLEAN,))
        return dict(found)

    @property
    def clean_alarms(self) -> int:
        """Runs without a fault in which something was found."""
        return sum(one.outcome == ALARM for one in self.drills)

    def report(self) -> Report:
        """Counts by kind and by layout, and every failure by itself."""
        if self.faulty:
            keys = {"kind": _kind, "layout": layout_text}
            yield from tables("faults in the chain", self.faulty, keys, ("drills", *OUTCOMES, *MORE), _row)
        yield (
            "found: the run went on right, or was ended and started again without the fault, and ended with the bits "
            "of a run without it; in the run: without a new start; harmless: nothing differs at the end; not covered: "
            "the run's table of coverage says that it may pass, always or before it is found; found later: of these"
        )
        for one in self.failed:
            what = f"{'; '.join(one.differs[:3]) or 'nothing differs'}; found {one.found}, named {one.named}"
            where = f"{layout_text(one)} {one.precision}, drill {one.number}, {one.persistence or CLEAN}"
            yield f"{one.outcome.upper()} {where}: {list(one.specs)}: exit codes {list(one.codes)}, {what}"
        steps = ", ".join(f"{count} of {layout}" for layout, count in self.clean_steps.items())
        yield f"steps without a fault: {steps}; {self.clean_alarms} alarms"


def _counts(drills: Sequence[ChainDrill], key: Callable[[ChainDrill], str]) -> dict[str, dict[str, int]]:
    groups: dict[str, Counter[str]] = {}
    for one in drills:
        groups.setdefault(key(one), Counter())[one.outcome] += 1
    return {name: dict(count) for name, count in sorted(groups.items())}


def _kind(drill: ChainDrill) -> str:
    return drill.kinds[0] if len(drill.kinds) == 1 else "two in one step"


def _cell(drill: ChainDrill) -> str:
    return f"{layout_text(drill)} {drill.precision}"


def _row(drills: Sequence[ChainDrill]) -> tuple[int, ...]:
    count = Counter(one.outcome for one in drills)
    later = sum(one.outcome == TOLD and bool(one.found) for one in drills)
    return len(drills), *(count[one] for one in OUTCOMES), sum(one.in_run for one in drills), later


# --- runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainPlan:
    """Size of the campaign, the head of its log.

    Args:
        clean: steps without a fault of each layout.
        precisions: names of types, of ``PRECISIONS``.
    """

    drills: int
    kinds: tuple[str, ...]
    layouts: tuple[Layout, ...]
    clean: int
    seed: int
    precisions: tuple[str, ...] = tuple(PRECISIONS)

    @property
    def cells(self) -> list[tuple[Layout, str]]:
        """Every layout with every type, among which the drills go round."""
        return [(layout, precision) for layout in self.layouts for precision in self.precisions]


@dataclass(frozen=True)
class PresetPlan(ChainPlan):
    """The same of runs that a preset alone protects.

    Args:
        protect: the word of the preset.
        budget: `sdc.budget` of the runs; None: its default.
    """

    protect: str = STANDARD
    budget: float | None = None


def run_chain_drills(plan: ChainPlan, log: Path | None, on_progress: Progress) -> ChainResult:
    """Do the drills that are not in the log yet.

    Raises:
        MegasdcError: a run without a fault failed, or the log cannot be used.
    """

    def run(left: Sequence[tuple[int, tuple[tuple[Layout, str], int]]], keep: Callable[[ChainDrill], None]) -> None:
        for (layout, precision), some in groupby((case for _, case in left), key=lambda case: case[0]):
            with scratch_folder() as folder:
                for drill in _Runs(folder, layout, precision, plan).drills([number for _, number in some]):
                    keep(drill)

    cells = plan.cells
    drawn = [(one, (WITHOUT, *range(first, plan.drills, len(cells)))) for first, one in enumerate(cells)]
    cases = [(cell, number) for cell, numbers in drawn for number in numbers]
    return ChainResult(Campaign("whole runs", cases, run, CampaignLog(log, plan, ChainDrill)).finish(on_progress))


class _Runs:
    """The runs of one layout and type."""

    def __init__(self, folder: Path, layout: Layout, precision: str, plan: ChainPlan) -> None:
        self._folder, self._layout, self._precision, self._plan = folder, layout, precision, plan
        self._preset = plan if isinstance(plan, PresetPlan) else None
        self._steps = PRESET_STEPS if self._preset else STEPS
        self._data = prepare_texts(folder)

    def drills(self, numbers: Sequence[int]) -> Iterator[ChainDrill]:
        """The outcomes of the drills of some numbers, after one that the others are compared with."""
        neutral = {"kind": "scale", "factor": 1.0, "steps": [1, 1]}
        phases = (OWNED, WHOLE, *(RESULTS if self._preset else ()))
        right = self._config("right", [{"phase": phase, **neutral} for phase in phases])
        codes = self._launch([(right, [])])[0]
        if not codes or any(codes):
            raise MegasdcError(f"a run without a fault ended with exit codes {list(codes)}: {self._precision}")
        cell = Cell(self._layout, _addresses(right.parent), random.Random(0))
        if WITHOUT in numbers:
            yield self._clean()
        planned = [self._planned(number, cell) for number in numbers if number != WITHOUT]
        for first in range(0, len(planned), AT_A_TIME):
            yield from self._run(planned[first : first + AT_A_TIME], right)

    def _planned(self, number: int, cell: Cell) -> Planned:
        """Draw a drill: kinds in turn, the rest by the seed and its number."""
        chance = random.Random(self._plan.seed * 1_000_003 + number)
        cell = replace(cell, chance=chance)
        names = self._plan.kinds
        turn, place = divmod(number, len(self._plan.cells))
        kinds = [names[(turn + 2 * place) % len(names)]]  # every kind in every layout and type
        if chance.random() < TWO:
            kinds.append(chance.choice(names))
        firsts = PRESET_FIRST_STEPS if self._preset else FIRST_STEPS
        persistence, first = chance.choice(list(PERSISTENCES)), chance.choice(firsts)
        steps = {"steps": [first, first if persistence == ONCE else None], "seed": chance.randrange(1 << 30)}
        drawn = [(kind, {**spec, **steps, **PERSISTENCES[persistence]}) for kind in kinds for spec in DRAWS[kind](cell)]
        owners, specs = zip(*drawn, strict=True)
        return Planned(number, self._layout, self._precision, tuple(kinds), persistence, specs, owners)

    def _clean(self) -> ChainDrill:
        steps = math.ceil(self._plan.clean / len(self._plan.precisions))
        run = self._config("clean", [], steps)
        codes = self._launch([(run, [])])[0]
        found, named = _found(run.parent)
        common = (WITHOUT, self._layout, self._precision, (CLEAN,), "", ())
        return ChainDrill(*common, (), found, named, codes, (), steps=steps)

    def _run(self, planned: Sequence[Planned], right: Path) -> list[ChainDrill]:
        runs = [self._config(f"drill_{one.number}", one.specs) for one in planned]
        codes = self._launch([(run, []) for run in runs])
        seen = [_found(run.parent) for run in runs]
        ended = [run for run, own in zip(runs, codes, strict=True) if any(own)]
        again = dict(zip(ended, self._launch([(run, ["megasdc.faults=[]"]) for run in ended]), strict=True))
        end = read_end(right.parent, right.parent / "checkpoints")
        drills = []
        for one, run, own, (found, named) in zip(planned, runs, codes, seen, strict=True):
            last = again.get(run, own)
            differs = [f"the last start ended with exit codes {list(last)}"]
            if last and not any(last):
                differs = why_different(read_end(run.parent, run.parent / "checkpoints"), end)
            common = (one.number, one.layout, one.precision, one.kinds, one.persistence, one.specs)
            changed = _changed(run.parent)
            passed = _passed(run.parent, self._steps)
            told = all(self._is_told(run.parent, ROWS[one.owners[spec]], one.persistence) for spec in passed)
            late = bool(found and passed)
            drills.append(ChainDrill(*common, changed, found, named, own, tuple(differs), told, late, self._steps))
        return drills

    def _is_told(self, run: Path, row: str, persistence: str) -> bool:
        """Whether a run says that a fault may pass: with a preset also one that lasts, until its part is due."""
        if self._preset is None:
            return _is_declared(run, row, persistence)
        rarer = any(one.fields["apart"] > 1 for one in read_events(run, kind=EVENT_KIND, name="cadence"))
        return rarer or _is_declared(run, row, ONCE)

    def _launch(self, launches: Sequence[tuple[Path, list[str]]]) -> list[tuple[int, ...]]:
        ranks = math.prod(self._layout)
        return launch([(run, settings, ranks) for run, settings in launches], ranks, self._folder, may_fail=True)

    def _config(self, name: str, faults: Sequence[Spec], steps: int | None = None) -> Path:
        steps = self._steps if steps is None else steps
        common: dict[str, Any] = {
            "faults": list(faults),
            "parallel": {"tensor": self._layout[0], "pipeline": self._layout[1], "timeout_s": TIMEOUT_S},
        }
        if self._preset is not None:
            common |= {"protect": self._preset.protect, "checkpoint": {"interval": 10, "keep_last": 6}}
            common |= {"sdc": {"budget": self._preset.budget}, "determinism": {}}
            own = {**PRECISIONS[self._precision], "pipeline": {"activation_checkpoint_interval": 0}}
            batch = {"train_batch_size": 2 * self._layout[2], **own}
            return write_config(self._folder / name, self._data, self._layout, steps, common, batch)
        more = {
            **common,
            "sdc": {"always_on": {"enabled": True, "coverage": "all", "slice_elements": 1_000_000}, "repeats": 2},
            "checkpoint": {"interval": 2, "keep_last": 3, "require_verified": "never"},
        }
        deepspeed = {"train_batch_size": 2 * self._layout[2], **PRECISIONS[self._precision]}
        return write_config(self._folder / name, self._data, self._layout, steps, more, deepspeed)


def _addresses(run: Path) -> Addresses:
    """What the ranks of a run hold, from faults that changed no bit."""
    found: dict[str, list[tuple[int, str, str, bool]]] = {}
    for one in read_events(run, kind="fault", name="injected"):
        fields = one.fields
        is_second = "norm" in fields["fqn"] or fields["slot"].startswith("bias")
        found.setdefault(fields["phase"], []).append((one.rank, fields["fqn"], fields["slot"], is_second))
    return {phase: sorted(set(some)) for phase, some in found.items()}


def _found(run: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tiers that found something, and the ranks that were named; where NaN is first says nothing of who is wrong."""
    tiers = {"finite" for _ in read_events(run, kind="nonfinite", name="first")}
    events = [one for one in read_events(run, kind=EVENT_KIND) if one.name in ("verdict", "finding")]
    named = {one.fields["rank"] for one in events if one.name == "verdict" and one.fields["rank"] is not None}
    return tuple(sorted({one.fields["tier"] for one in events} | tiers)), tuple(sorted(named))


def _passed(run: Path, steps: int) -> list[int]:
    """Faults that changed a bit in a step of which nothing was found, and that the start after it went on from.

    Parameters, their copies and settings are compared in the step after; after an end without a finding the start goes
    on from any step.
    """
    findings = [one for one in read_events(run, kind=EVENT_KIND) if one.name in ("verdict", "finding")]
    found = {one.step or 0 for one in findings} | {
        (one.step or 0) - 1 for one in findings if one.fields["tier"] in STATE_TIERS
    }
    found |= {one.step or 0 for one in read_events(run, kind="nonfinite", name="first")}
    last = max((one.step or 0 for one in read_events(run, kind="resume", name="checkpoint")), default=steps)
    fired = [one for one in read_events(run, kind="fault", name="injected") if one.fields["changed"]]
    return sorted({one.fields["spec"] for one in fired if (one.step or 0) <= last and one.step not in found})


def _changed(run: Path) -> tuple[int, ...]:
    firings = read_events(run, kind="fault", name="injected")
    return tuple(sorted({one.rank for one in firings if one.fields["changed"]}))


def _is_declared(run: Path, row: str, persistence: str) -> bool:
    """Whether the table that a run printed says that a fault may pass.

    It has the row, and not among those that are compared in every step; a fault that comes again each time may only
    pass where rounding explains it.
    """
    for one in read_events(run, kind="start", name="coverage"):
        lines = [line for line in one.fields["table"] if line.startswith(f"{row}  ")]
        always = "".join(line for line in one.fields["table"] if line.startswith(ALWAYS_COMPARED))
        listed = always.removeprefix(ALWAYS_COMPARED).strip(": .").split(", ")
        if lines and row not in listed:
            return persistence != ALWAYS or any("rounding" in line for line in lines)
    return False
