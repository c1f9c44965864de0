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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megasdc.common.errors import CorruptionError
from megasdc.events import read_events
from megasdc.sdc.incident import load_incidents
from megasdc.sdc.verdict import ELSEWHERE, GOLDEN, MAJORITY, NOT_REPRODUCED, OWN_CODE, PERSISTENT, REFEREE
from tools.bench.campaign import Campaign, CampaignLog, tables
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
    Sizes,
    draw_case,
    draw_cases,
)
from tools.bench.guard.options import GuardOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import TIMEOUT_S, Messages, Progress, ignore_progress, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result
from tools.trainings.broken_unit import BrokenUnit
from tools.trainings.engines import (
    PIPELINE,
    TRAINER,
    TRANSIENT,
    Planted,
    deepspeed_config,
    llama_engine,
    llama_trainer,
    pipeline_engine,
    train,
)

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
        keys: dict[str, Callable[[Guarded], str]] = {
            "training": lambda one: one.case.name,
            "fault": lambda one: one.case.kind,
            "check": lambda one: one.case.golden or "audit",
        }
        columns = ("trainings", "with a fault", "right", "audits", "clean audits")
        yield from tables("guards", self.trainings, keys, columns, _row)
        for one in self.trainings:
            for problem in one.problems:
                yield f"{one.case}: {problem}"


def _row(found: Sequence[Guarded]) -> tuple[int, ...]:
    faulty = sum(one.case.planted is not None for one in found)
    right = sum(not one.problems for one in found)
    clean = sum(one.audits for one in found if one.case.planted is None)
    return len(found), faulty, right, sum(one.audits for one in found), clean


def bench_guard(options: GuardOptions, log: Path | None = None, on_progress: Progress = ignore_progress) -> GuardResult:
    """Run the trainings that are not in the log yet, with all ranks on this machine.

    Args:
        log: file that keeps finished trainings; None: none does.

    Raises:
        MegasdcError: a rank failed in another way than by its guard, or the log cannot be used.
    """
    machine, kept = describe_machine(), CampaignLog(log, options, Guarded)
    drawn = draw_cases(options.drawn, options.trainings, options.seed) + _golden_cases(options)
    cases = sorted(drawn, key=_world)
    campaign = Campaign("trainings", cases, partial(_run, cases), kept)
    return GuardResult(machine, options, campaign.finish(on_progress))


def _world(case: Case) -> tuple[int, int]:
    """Ranks and stages of a training: DeepSpeed keeps a pipeline's grid, so processes run those of one world only."""
    return case.ranks, case.stages


def _run(cases: Sequence[Case], left: Sequence[tuple[int, Case]], keep: Callable[[Guarded], None]) -> None:
    """Run some of the cases; those before that record a golden file are run again where it is needed."""
    verified = {(one.name, one.precision) for _, one in left if one.golden == VERIFY}
    before = [one for one in cases[: left[0][0]] if one.golden == RECORD and (one.name, one.precision) in verified]
    with scratch_folder() as folder:
        for number, world in enumerate(sorted({_world(one) for _, one in left})):
            again, new = ([one for one in some if _world(one) == world] for some in (before, [one for _, one in left]))
            places = [folder / f"{number}_{place}" for place in range(len(again) + len(new))]
            told = list(zip([*again, *new], places, strict=True))
            results = iter(told)

            def receive(
                message: dict[str, Any], results: Iterator[tuple[Case, Path]] = results, known: Sequence[Case] = again
            ) -> None:
                case, place = next(results)
                if not any(case is one for one in known):
                    keep(_guarded(case, place, message["codes"], message["audits"]))

            request = {"cases": [(case, str(place)) for case, place in told]}
            run_in_ranks(run_cases, request, world[0], folder, receive)


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


# --- in the ranks -----------------------------------------------------------------------------------------------------


WRONG = 64.0
"""Factor of what a unit computes: an error as small as rounding is taken for a property of a kernel."""


def run_cases(messages: Messages, cases: list[tuple[Case, str]]) -> None:
    """Train once for each case, with a guard that writes to its folder.

    Rank 0 sends the exit codes by rank and the number of audits.
    """
    import deepspeed

    from megasdc.parallel.collectives import gather_objects
    from megasdc.parallel.groups import init_process_group

    init_process_group(TIMEOUT_S)  # the ranks meet in a folder, which only this looks for
    deepspeed.init_distributed(dist_backend="gloo")
    for case, folder in cases:
        code, audits = _train(case, folder)
        messages.send(codes=gather_objects(code), audits=audits)


def _train(case: Case, folder: str) -> tuple[int, int]:
    """Exit code and number of audits of a training."""
    import torch.distributed as dist

    import megasdc

    here = case.planted if dist.get_rank() in case.wrong else None
    planted, unit = (here, nullcontext()) if case.sizes is None else (None, _unit(case.sizes, here))
    config = deepspeed_config(case.zero, case.precision)
    audit = {"interval": INTERVAL, "permuted": case.permuted, "enabled": not case.golden}
    settings: dict[str, Any] = {"logging": {"run_dir": folder}, "audit": audit}
    if case.golden:
        path = Path(folder).parent / f"{case.name}_{case.precision}.golden"
        settings["golden"] = {"path": str(path), "record": case.golden == RECORD, "interval": INTERVAL}
    if case.training == TRAINER:
        trainer = llama_trainer(config, planted, f"{folder}_trainer", case.steps)
        attached = megasdc.attach(trainer, settings)
        with unit:
            code = _code(trainer.train)
        attached.close()
        trainer.deepspeed.destroy()
        return code, attached.guard.audits
    if case.training == PIPELINE:
        engine = pipeline_engine(config, case.stages, planted)
    else:
        engine = llama_engine(config, planted)
    guard = megasdc.attach(engine, settings)
    with unit:
        code = _code(partial(train, engine, case.steps, guard.dims.dp_rank))
    guard.close()
    engine.destroy()
    return code, guard.audits


def _unit(sizes: Sizes, planted: Planted | None) -> AbstractContextManager[object]:
    """A unit that is wrong at a drawn place, on the rank where it is planted."""
    if planted is None:
        return nullcontext()
    chance = random.Random(planted.seed)
    return BrokenUnit(sizes, (chance.randrange(1 << 10), chance.randrange(1 << 10)), WRONG)


def _code(training: Callable[[], Any]) -> int:
    """Exit code of a process that ends so."""
    try:
        training()
    except SystemExit as error:
        return int(str(error.code))
    return 0
