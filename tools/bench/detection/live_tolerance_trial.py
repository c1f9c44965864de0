"""Outcome of one fault with the toleranced checks, against the outcome to be expected of its size.

A check is blind below its threshold. A fault adds to what rounding or chance make of a clean step, which is at most the
threshold; so one of up to twice the threshold may be hidden, and a larger one may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megasdc.train.detection.toleranced import PAST, REDUCTION, REPLICAS, UNITS, UPDATE
from tools.bench.detection.live_cases import CLEAN, LASTING, OTHER, SHARD, STATE, STEPPED, SUM
from tools.bench.result import Report, table

COVERED = {
    SUM: (REDUCTION,),
    SHARD: (REDUCTION,),
    STEPPED: (UPDATE,),
    LASTING: (UPDATE,),
    OTHER: (REPLICAS, PAST),
    STATE: (),
}
"""Which checks may see the faults of a row."""
UNCOVERED = {STATE: "not detectable, because the update is computed again from what the optimizer gets"}
CERTAIN = 2.0
"""Thresholds above which a fault cannot be hidden."""
ANY = "any"
SIZES = {"smaller": "< 1", "up to twice": f"1 to {CERTAIN:g}", "larger": f"> {CERTAIN:g}", "not looked at": "unseen"}
"""Heading of each class of sizes."""


@dataclass(frozen=True)
class ToleranceTrial:
    """One short run with a fault, or a clean one, in which ``kind`` and ``address`` are empty and ``fault_step`` is 0.

    ``skipped``: the optimizer skipped the step of the fault, which no toleranced check judges then; ``covered``: the
    checks of this row looked at the changed value. ``sizes`` are changes by check, in thresholds of that step;
    ``thresholds`` those before the first step, in the check's unit; ``warnings`` (step, check) in their order.
    """

    layout: str
    precision: str
    recompute: bool
    dropout: bool
    row: str
    kind: str
    address: str
    ranks: tuple[int, ...]
    steps: int
    fault_step: int
    harmed: bool
    skipped: bool
    covered: bool
    sizes: dict[str, float]
    thresholds: dict[str, float]
    warnings: tuple[tuple[int, str], ...]
    audit: bool
    accused: tuple[int, ...]

    @property
    def false_warnings(self) -> int:
        """Warnings that no fault came before."""
        return sum(not self.harmed or step < self.fault_step for step, _ in self.warnings)

    def detected(self, check: str) -> bool:
        """Whether a check warned of the step of the fault, or of one of its steps."""
        return any(
            name == check and step >= self.fault_step and (step == self.fault_step or self.row == LASTING)
            for step, name in self.warnings
        )

    def was_first(self, check: str) -> bool:
        """Whether no check warned in an earlier step than this one."""
        return bool(self.warnings) and (self.warnings[0][0], check) in self.warnings

    @property
    def met(self) -> bool:
        """Whether the checks reported what they have to."""
        if self.false_warnings or not set(self.accused) <= set(self.ranks):
            return False
        if not self.harmed or self.skipped:
            return True
        if self.row == LASTING and not self.covered:
            return False
        called = self.audit or not any(self.detected(check) for check in UNITS)
        return called and all(self.detected(check) for check, size in self.sizes.items() if size > CERTAIN)


def size_class(size: float) -> str:
    """The class of a fault's size, which is in thresholds."""
    return "smaller" if size <= 1 else "up to twice" if size <= CERTAIN else "larger"


def count_tolerance(trials: Iterable[ToleranceTrial]) -> dict[str, Counter[str]]:
    """Counts of the trials with faults, by row and check that may see them."""
    groups: dict[str, Counter[str]] = {}
    for trial in trials:
        if trial.row == CLEAN:
            continue
        for check in COVERED[trial.row] or (ANY,):
            count = groups.setdefault(f"{trial.row}: {check}", Counter())
            count["injected"] += 1
            count["no bit changed"] += not trial.harmed
            count["step skipped"] += trial.skipped
            count["wrong accusations"] += not set(trial.accused) <= set(trial.ranks)
            if trial.harmed and not trial.skipped:
                count["first"] += trial.was_first(check)
                count["audits"] += trial.audit
                _count_found(count, trial, check)
    return groups


def _count_found(count: Counter[str], trial: ToleranceTrial, check: str) -> None:
    if check in trial.sizes:
        name = size_class(trial.sizes[check])
        count[name] += 1
        count[f"{name}, found"] += trial.detected(check)
    else:
        count["not looked at"] += 1
        count["not looked at, found"] += any(trial.detected(one) for one in UNITS)


@dataclass(frozen=True)
class ToleranceResult:
    """All trials of the toleranced checks, with faults and clean."""

    also = ("passed", "by_row", "thresholds", "not_detectable", "clean_steps", "false_warnings")
    not_detectable = UNCOVERED

    trials: Sequence[ToleranceTrial] = field(repr=False)

    @property
    def clean_steps(self) -> int:
        """Steps of clean runs."""
        return sum(trial.steps for trial in self.trials if trial.row == CLEAN)

    @property
    def false_warnings(self) -> int:
        """Warnings that no fault came before."""
        return sum(trial.false_warnings for trial in self.trials)

    @property
    def missed(self) -> list[ToleranceTrial]:
        """Trials in which the checks did not report what they have to."""
        return [trial for trial in self.trials if not trial.met]

    @property
    def passed(self) -> bool:
        """Whether all trials were as they have to be, and faults that cannot be hidden were among them."""
        return not self.missed and any(size > CERTAIN for trial in self.trials for size in trial.sizes.values())

    @property
    def by_row(self) -> dict[str, Counter[str]]:
        """Counts of the trials with faults, by row and check that may see them."""
        return count_tolerance(self.trials)

    @property
    def thresholds(self) -> dict[str, tuple[float, float]]:
        """Least and largest threshold of each check after the warm-up of each layout and type, in its unit."""
        of = {name: [trial.thresholds[name] for trial in self.trials] for name in UNITS} if self.trials else {}
        return {name: (min(values), max(values)) for name, values in of.items()}

    def report(self) -> Report:
        """Found by size of the fault, thresholds, false warnings, every miss."""
        counts = self.by_row
        rows = [
            [
                name,
                *(str(count[column]) for column in ("injected", "no bit changed", "step skipped")),
                *(f"{count[f'{size}, found']}/{count[size]}" if count[size] else "-" for size in SIZES),
                *(str(count[column]) for column in ("first", "audits")),
            ]
            for name, count in sorted(counts.items())
        ]
        columns = ("fault: check", "faults", "same", "skip", *SIZES.values(), "first", "audits")
        yield table("toleranced checks: found of injected faults, by size in thresholds", columns, rows, tight=True)
        yield (
            "size: how far the fault moves the value of the check; unseen: outside the slice of that step, or no check "
            "looks there; same: no bit changed; skip: the gradient was not finite, and the optimizer did not step; "
            "first: no check warned before this one; audits: one was called"
        )
        wrong = sum(count["wrong accusations"] for count in counts.values())
        yield f"healthy ranks were named in {wrong} trials"
        for row, reason in UNCOVERED.items():
            yield f"{row}: {reason}"
        for check, (least, most) in self.thresholds.items():
            yield f"threshold of {check} as measured on clean steps: {least:.3g} to {most:.3g} {UNITS[check]}"
        for trial in self.missed:
            sizes = ", ".join(f"{size:.3g} of {check}" for check, size in trial.sizes.items()) or "no size"
            said = ", ".join(f"{check} in step {step}" for step, check in trial.warnings) or "nothing"
            yield (
                f"MISS {trial.layout} {trial.precision}, {trial.row}: {trial.kind or 'no fault'} on ranks "
                f"{list(trial.ranks)}, {trial.address or f'{trial.steps} steps'} ({sizes}): warned {said}; named "
                f"{list(trial.accused)}"
            )
        yield f"{self.clean_steps} clean steps, {self.false_warnings} false warnings"
