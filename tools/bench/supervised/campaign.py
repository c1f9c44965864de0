"""Supervised runs, ``python -m tools.bench supervised``: whether runs with faults end by themselves, as without them.

Real ranks train a tiny model between test hosts, over real SSH, under ``megasdc supervise`` on a host of its own; there
is a spare. Faults come at random moments, also while a start recovers from the one before. Nobody does anything, but
for the command of a supervisor that was killed, and for hosts that get their power or their cable back. Each run must
end with exit code 0, with the losses, the last checkpoint and the places in the data of a run without a fault, bit for
bit, with few attempts, and with no healthy host away whose test has passed. A run that went back over samples is
compared with one that skips the same ones; one that had fewer replicas for a while by its losses, but for rounding.
Where conditions of hosts leave too few of them, a run may end with the exit code of the condition and name a host.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from megasdc.common.errors import LaunchError, MegasdcError
from megasdc.events import read_events
from megasdc.ops.cluster import unavailable_reason
from megasdc.ops.supervise.history import JournalHistory
from megasdc.ops.supervise.journal import FOLDER, read_journal
from megasdc.ops.supervise.launch_backend import union
from tools.bench.campaign import Campaign, CampaignLog, Layout
from tools.bench.checkpoints.recovery_checks import End, read_end, why_different
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.small.drill import last_step, prepare_texts
from tools.bench.supervised.config import STEP_S, STEPS, Training, training_of, write_config
from tools.bench.supervised.drill import Drill, Strike, blamed_wrongly, read_drill
from tools.bench.supervised.faults import KINDS, LEAVE_OUT
from tools.bench.supervised.options import SupervisedOptions
from tools.bench.supervised.slurm import in_slurm
from tools.bench.supervised.target import OWN_ENDS, SPARES, Target, over_ssh
from tools.bench.supervised.verdict import SupervisedResult
from tools.slurm_hosts import slurm_unavailable_reason

Planned = tuple[Layout, tuple[str, ...], int]
"""Layout, kinds of faults and seed of a run."""
Engine = Callable[[Path, int, int, int, random.Random], AbstractContextManager[Target]]
"""Makes hosts for a run."""

ROUNDING = 1e-4
"""Largest relative difference of a loss, where a run had fewer replicas for a while."""
PROGRESS = (3, 12)
"""Steps between two faults, least and most; or the next one comes while a start recovers."""
IN_RECOVERY = 0.3
"""Share of faults that do not wait for a step."""
GIVE_UP_S = 600.0
_POLL_S = 0.3


def bench_supervised(
    options: SupervisedOptions,
    log: Path | None = None,
    keep: Path | None = None,
    on_progress: Progress = ignore_progress,
) -> SupervisedResult:
    """Do the runs that are not in the log yet.

    Args:
        log: file that keeps finished runs; None: none does.
        keep: folder that gets the folders of the runs, but for their checkpoints; None: they are removed.

    Raises:
        LaunchError: this machine cannot make test hosts.
        MegasdcError: the log cannot be used.
    """
    if (reason := unavailable_reason() or (slurm_unavailable_reason() if options.slurm else None)) is not None:
        raise LaunchError(f"supervised runs need test hosts: {reason}")
    engine: Engine = in_slurm if options.slurm else over_ssh
    machine, kept, chance = describe_machine(), CampaignLog(log, options, Drill), random.Random(options.seed)

    def do_runs(left: Sequence[tuple[int, Planned]], add: Callable[[Drill], None]) -> None:
        with scratch_folder() as folder:
            runs = _Runs(engine, folder, prepare_texts(folder))
            for number, (layout, kinds, seed) in left:
                drill, run = runs.with_faults(f"run_{number}", layout, kinds, seed)
                if keep is not None:
                    shutil.copytree(run, keep / f"run_{number}", ignore=lambda *_: ["checkpoints"], dirs_exist_ok=True)
                add(drill)

    campaign = Campaign("runs", _plan(options, chance), do_runs, kept)
    return SupervisedResult(machine, options, campaign.finish(on_progress))


def _plan(options: SupervisedOptions, chance: random.Random) -> list[Planned]:
    """Kinds in turn, in another order each time; one that does not fit a run waits for the next that it fits.

    Raises:
        LaunchError: no layout has as many replicas as a kind needs.
    """
    if lacking := [name for name in options.drawn if not any(_fits(name, layout) for layout in options.sizes)]:
        fewest, most = KINDS[lacking[0]].replicas
        raise LaunchError(f"{', '.join(lacking)} need {fewest} to {most} replicas: add a layout")
    names: list[str] = []
    found = []
    for number in range(options.drills):
        layout, kinds = options.sizes[number % len(options.sizes)], list[str]()
        count = options.faults if options.fewest is None else chance.randint(options.fewest, options.faults)
        while len(kinds) < count:
            name = next((name for name in names if _fits(name, layout, kinds)), None)
            if name is None:
                drawn = options.drawn
                if not any(_fits(one, layout, kinds) for one in drawn):
                    raise LaunchError(f"no kind can be the next fault of a run that has {', '.join(kinds)}: add a kind")
                names += chance.sample(drawn, len(drawn))
            else:
                kinds.append(name)
                names.remove(name)
        found.append((layout, tuple(kinds), chance.randrange(1 << 30)))
    return found


def _fits(name: str, layout: Layout, kinds: Sequence[str] = ()) -> bool:
    """Whether a kind can come about in a run that has others; of those with settings of their own, one can."""
    fewest, most = KINDS[name].replicas
    prepared = [one for one in (*kinds, name) if KINDS[one].prepare is not None]
    return fewest <= layout[2] <= most and (len(prepared) < 2 or KINDS[name].prepare is None)


def _slots(layout: Layout) -> int:
    """Ranks of a host: two where there are four, else one."""
    return 2 if math.prod(layout) == 4 else 1


class _Runs:
    """Runs in a folder, beside those without a fault that they are compared with."""

    def __init__(self, engine: Engine, folder: Path, data: Path) -> None:
        self._engine, self._folder, self._data = engine, folder, data
        self._ends: dict[Training, tuple[End, float]] = {}

    def with_faults(self, name: str, layout: Layout, kinds: Sequence[str], seed: int) -> tuple[Drill, Path]:
        """Run with faults, and compare; returns the run's folder, too.

        Raises:
            LaunchError: the run without a fault fails.
        """
        training = training_of(layout, kinds)
        drill, run = self._run(name, training, kinds, seed)
        if drill.problems or drill.truthful:
            return drill, run
        skipped = union(JournalHistory.of(read_journal(run / FOLDER)).skip)
        training = replace(training, skip=tuple((first, end) for first, end in skipped))
        if training not in self._ends:
            plain, plain_run = self._run(f"plain_{len(self._ends)}", training, (), 0)
            if plain.problems:
                raise LaunchError(f"a run without a fault has failed: {'; '.join(plain.problems)}")
            self._ends[training] = (read_end(plain_run, plain_run / "checkpoints"), plain.seconds)
        left_out = any(read_events(run, kind="isolation"))
        whole = len({len(one.hosts) for one in drill.attempts}) == 1 and not left_out
        right, plain_s = self._ends[training]
        own = sorted((run.parent / OWN_ENDS).glob("*"))
        try:
            end = read_end(run, *(own or [run / "checkpoints"]))
            problems = why_different(end, right, 0.0 if whole else ROUNDING)
        except MegasdcError as error:
            problems = [f"its end cannot be read: {error}"]
        if drill.strikes and not left_out and set(kinds) <= LEAVE_OUT:
            problems.append("the wrong replica was not left out")
        return replace(drill, problems=tuple(problems), plain_s=plain_s), run

    def _run(self, name: str, training: Training, kinds: Sequence[str], seed: int) -> tuple[Drill, Path]:
        """Run once; returns also its folder."""
        started, code = time.monotonic(), None
        folder = self._folder / name
        folder.mkdir()
        slots, chance = _slots(training.layout), random.Random(seed)
        spares = max((KINDS[kind].spares for kind in kinds), default=SPARES)
        strikes: list[Strike] = []
        with self._engine(folder, math.prod(training.layout) // slots, spares, slots, chance) as target:
            write_config(target, target.copy_data(self._data), training, kinds)
            for before in (KINDS[kind].before for kind in kinds):
                if before is not None:
                    before(target)
            target.start()
            until = time.monotonic() + GIVE_UP_S
            for kind in kinds:
                strike = KINDS[kind].strike
                if strike is not None and _wait_for_moment(target, until):
                    strikes.append(Strike(kind, time.time()))
                    strike(target)
            while (code := target.exit_code()) is None and time.monotonic() < until:
                target.undo()
                time.sleep(_POLL_S)
            run, truthful = target.run, _truthful_end(target, kinds, code)
            target.copy_own_checkpoints()
        drill = read_drill(kinds, training.layout, run, strikes, time.monotonic() - started)
        problems = [*target.problems, *drill.problems]
        if all(KINDS[kind].blames for kind in kinds) and kinds:
            problems += blamed_wrongly(read_journal(run / FOLDER), target.blamed)
        if code is None:
            problems.append(f"it has not ended in {GIVE_UP_S:g} s")
        elif code and not truthful:
            problems.append(f"it has ended with exit code {code}")
        told = tuple(target.told)
        return replace(drill, problems=tuple(problems), truthful=truthful, told=told), run


def _truthful_end(target: Target, kinds: Sequence[str], code: int | None) -> str:
    """The reason that a run gave for its end, where too few hosts were left and it named one of those; else empty."""
    fit = [one for one in target.hosts.names[1:] if one not in target.unfit and target.hosts.is_on(one)]
    if not code or code not in {one for kind in kinds for one in KINDS[kind].may_end} or len(fit) >= target.num_hosts:
        return ""
    lines = target.last_words().splitlines()
    return next((line for line in reversed(lines) if any(host in line for host in target.unfit)), "")


def _wait_for_moment(target: Target, until: float) -> bool:
    """Wait for the moment of the next fault; whether it may come."""
    chance = target.chance
    steps, attempts = last_step(target.run), len(target.entries("started"))
    in_recovery = attempts > 0 and chance.random() < IN_RECOVERY
    if in_recovery:
        time.sleep(chance.uniform(0.0, 10.0))
        return _is_under_way(target)
    wanted = max(steps, 4) + chance.randint(*PROGRESS)
    while last_step(target.run) < min(wanted, STEPS - 5):
        if target.exit_code() is not None or time.monotonic() > until:
            return False
        target.undo()
        time.sleep(_POLL_S)
    time.sleep(chance.uniform(0.0, 3 * STEP_S))
    return _is_under_way(target)


def _is_under_way(target: Target) -> bool:
    """Whether a run has neither ended nor done its last step.

    After that one, which may be seen late where the run folder was full, a fault would prove nothing: with a host would
    go the last checkpoint that it alone has, and no run would be left that could miss it.
    """
    return target.exit_code() is None and last_step(target.run) < STEPS
