"""Guards, ``python -m tools.bench guard``: are wrong ranks of trainings that are not megasdc's own named?

Real ranks of this machine train as users of DeepSpeed do; on one of three replicas a submodule is wrong: always, half
of the times, or once, in its output, in the gradient of its input, or in that of its weight. Rank, submodule and
direction must be named, and nobody else; in trainings without a fault nothing may be found. Likewise by the referee
where there are two replicas, and by audits with elements in other places where there is one, and a unit of its device
is always wrong. With a golden trace
(``--golden``) all replicas are wrong alike, and all must be named.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megasdc.common.errors import CorruptionError
from megasdc.events import read_events
from megasdc.sdc.incident import load_incidents
from megasdc.sdc.verdict import ELSEWHERE, GOLDEN, MAJORITY, NOT_REPRODUCED, OWN_CODE, PERSISTENT, REFEREE
from tools.bench.guard.cases import (
    CLEAN,
    INTERVAL,
    OF_TWO,
    PHASES,
    RECORD,
    UNIT,
    VERIFY,
    VOTED,
    Case,
    draw_case,
    draw_cases,
)
from tools.bench.guard.options import GuardOptions
from tools.bench.guard.rank import run_cases
from tools.bench.guard.trainings import TRANSIENT
from tools.bench.machine import describe_machine
from tools.bench.rank import run_in_ranks, scratch_folder
from tools.bench.result import Progress, Report, Result, table

BASES = {PERSISTENT: {MAJORITY, REFEREE, OWN_CODE}, OF_TWO: {REFEREE, OWN_CODE}, UNIT: {ELSEWHERE}}
"""Of verdicts that are persistent, by kind of fault."""


@dataclass(frozen=True)
class Guarded:
    """What came of a training; ``problems``: what was not right, a line each."""

    case: Case
    audits: int
    verdicts: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class GuardResult(Result):
    """All trainings."""

    trainings: Sequence[Guarded] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether all was right in all of them."""
        return not any(one.problems for one in self.trainings)

    def report(self) -> Report:
        """Counts by training and by kind of fault, and what was not right."""
        by: dict[str, Callable[[Guarded], str]] = {
            "training": lambda one: one.case.name,
            "fault": lambda one: one.case.kind,
            "check": lambda one: one.case.golden or "audit",
        }
        for title, key in by.items():
            groups: dict[str, list[Guarded]] = {}
            for one in self.trainings:
                groups.setdefault(key(one), []).append(one)
            rows = [_row(name, found) for name, found in groups.items()] + [_row("all", self.trainings)]
            columns = (title, "trainings", "with a fault", "right", "audits", "clean audits")
            yield table(f"guards by {title}", columns, rows, total=True)
        for one in self.trainings:
            for problem in one.problems:
                yield f"{one.case}: {problem}"


def _row(name: str, found: Sequence[Guarded]) -> tuple[str, ...]:
    faulty = sum(one.case.planted is not None for one in found)
    right = sum(not one.problems for one in found)
    clean = sum(one.audits for one in found if one.case.planted is None)
    return name, *map(str, (len(found), faulty, right, sum(one.audits for one in found), clean))


def bench_guard(options: GuardOptions, on_progress: Progress = lambda what, done, total: None) -> GuardResult:
    """Run all trainings with all ranks on this machine.

    Raises:
        MegasdcError: a rank failed in another way than by its guard.
    """
    machine, cases = describe_machine(), draw_cases(options.drawn, options.trainings, options.seed)
    found = list[Guarded]()
    cases += _golden_cases(options)
    with scratch_folder() as folder:
        for ranks, stages in sorted({(one.ranks, one.stages) for one in cases}):  # DeepSpeed keeps a pipeline's grid
            some = [one for one in cases if (one.ranks, one.stages) == (ranks, stages)]
            places = [folder / f"{ranks}_{stages}_{number}" for number in range(len(some))]
            waiting = iter(zip(some, places, strict=True))

            def take(message: dict[str, Any], waiting: Iterator[tuple[Case, Path]] = waiting) -> None:
                found.append(_guarded(*next(waiting), message["codes"], message["audits"]))
                on_progress("trainings", len(found), len(cases))

            told = [(case, str(place)) for case, place in zip(some, places, strict=True)]
            run_in_ranks(run_cases, {"cases": told}, ranks, folder, take)
    return GuardResult(machine, options, found)


def _golden_cases(options: GuardOptions) -> list[Case]:
    """Trainings that record, then those that verify."""
    drawn, names, chance = list[Case](), options.drawn, random.Random(options.seed)
    for number in range(options.golden):
        kind, phase = VOTED[number % len(VOTED)], PHASES[number // len(VOTED) % len(PHASES)]
        turn = number // len(names)
        case = draw_case(names[number % len(names)], kind, ("fp32", "bf16")[turn % 2], phase, chance)
        drawn.append(replace(case, golden=VERIFY))
    kinds = dict.fromkeys((one.name, one.precision) for one in drawn)
    return [Case(name, CLEAN, precision, None, steps=1, golden=RECORD) for name, precision in kinds] + drawn


def _guarded(case: Case, folder: Path, codes: Sequence[int], audits: int) -> Guarded:
    incidents = [one for _, one in load_incidents(folder / "reports", [])]
    verdicts = tuple(one.verdict for one in incidents)
    problems = []
    halted = any(one.done == "halted" for one in incidents)
    if set(codes) != {CorruptionError.exit_code if halted else 0}:
        problems.append(f"ranks ended with exit codes {list(codes)}")
    if case.golden:
        audits = sum(1 for _ in read_events(folder, kind="golden"))
    if not halted and audits != -(-case.steps // INTERVAL):
        problems.append(f"{audits} audits were made")
    if case.planted is None:
        problems += [f"something was found: {one.flagged or one.disputed}" for one in incidents]
    else:
        wrong = [(rank, case.planted.submodule, case.planted.phase) for rank in case.wrong]
        for one in incidents:
            named = [(flag.rank, flag.first.fqn, flag.first.phase) for flag in one.flagged]
            if named != wrong or one.disputed:
                problems.append(f"named were {named}, disputed {len(one.disputed)} ranks")
        if not incidents:
            problems.append("nothing was found")
        allowed = {TRANSIENT: {NOT_REPRODUCED}, **{kind: {PERSISTENT} for kind in BASES}}.get(case.kind)
        if allowed is not None and not set(verdicts) <= allowed:
            problems.append(f"verdicts were {', '.join(verdicts)}")
        bases = {one.basis for one in incidents}
        if not bases <= ({GOLDEN} if case.golden else BASES.get(case.kind, bases)):
            problems.append(f"bases were {', '.join(sorted(bases))}")
    return Guarded(case, audits, verdicts, tuple(problems))
