"""Golden traces of a guarded training: does its model, on seeded parameters, compute what trusted hardware computed?

It finds what the comparison of replicas cannot: a fault that all of them have in common, or of a single one.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from megasdc.attached.engine import precision_of
from megasdc.attached.golden_file import Packed, Part, evaluated, key_of, load_part, pack, save_parts
from megasdc.attached.probe import Batch, Probe
from megasdc.attached.record import Recorder
from megasdc.attached.seeded import seed_problems, seeded_parameters
from megasdc.attached.settings import recording_problems
from megasdc.attached.training import Part as Protection
from megasdc.attached.training import Training
from megasdc.common.errors import ConfigError, MegasdcError, StorageError, TraceError
from megasdc.parallel.collectives import gather_objects, gather_objects_on
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finite import FiniteRecorder
from megasdc.sdc.golden.answer import GoldenAnswer, GoldenRun, compare_run, judge_replicas
from megasdc.sdc.incidents.settled import Settled
from megasdc.sdc.trace import Trace, digest

logger = logging.getLogger(__name__)

T = TypeVar("T")
STEP = 1
"""As of which traces are recorded, whatever the step of training."""
GAPS = ("results of submodules that sum over tensor ranks",)
"""What a trace lacks: a tensor rank that differs may have received what differs."""


class GuardGolden(Protection):
    """Records a golden trace, or verifies this training's ranks with one, before optimizer steps.

    Raises:
        ConfigError: nothing can be recorded.
        TraceError: the file is missing, damaged, or holds for another training; on all ranks.

    Collective: all ranks of the world, ``before_step`` too.
    """

    def __init__(self, training: Training) -> None:
        engine, dims, settings = training.engine, training.dims, training.settings
        self._training, self._engine, self._dims = training, engine, dims
        self._world, self._copies, self._tell = training.world, training.copies, training.tell
        self._settings, self._repeats = settings.golden, settings.sdc.repeats
        assert settings.golden.path is not None, "else there is nothing to do"
        self._path = Path(settings.golden.path)
        self._cells = ParallelDims(dims.tensor, 1, dims.data * dims.pipeline, dims.rank)
        """Stages compute what they are given in the file, and nothing of one another: each is judged for itself."""
        self._first = True
        self._finite = FiniteRecorder()
        recorder = Recorder(engine.module, training.watched, training.algorithm)
        recorder.listener = self._finite if settings.golden.record else None
        off = f'golden.path: got "{self._path}"', "null"
        self._probe = Probe(engine.module, engine.device, recorder, settings.golden.seed, self._wanted, off)
        self._key: dict[str, Any] = {}
        self._part: Part | None = None
        try:
            self._part = self._together(self._begin)
        except BaseException:
            self._probe.close()
            raise

    def close(self) -> None:
        """Look at no further forward pass."""
        self._probe.close()

    def before_step(self, step: int) -> Iterable[Settled]:
        """Record or verify, if it is due.

        Raises:
            ConfigError: on all ranks, where the model cannot be computed so.
            TraceError: likewise, where it computes other submodules than the file has.
            StorageError: likewise, where the file cannot be written.
        """
        first, self._first = self._first, False
        if self._settings.record:
            if first:
                self._record(step)
        elif first or step % self._settings.interval == 0:
            yield from self._verify(step)

    def _begin(self) -> Part | None:
        if problems := seed_problems(self._engine.module):
            raise ConfigError([f'golden.path: got "{self._path}", and {one}; set it to null.' for one in problems])
        self._key = key_of(
            self._engine.module,
            self._training.watched,
            precision=precision_of(self._engine),
            layout=f"TP{self._dims.tensor} x PP{self._dims.pipeline}",
            algorithm=self._training.algorithm.name,
            seed=self._settings.seed,
        )
        if not self._settings.record:
            return load_part(self._path, self._dims, self._key)
        if self._dims.rank == 0 and (problems := recording_problems(self._path)):
            raise ConfigError(problems)
        return None

    def _wanted(self) -> int | None:
        """The step that runs, if this rank's batch is recorded in it."""
        wanted = self._settings.record and self._first and self._dims.dp_rank == 0
        return self._training.step if wanted else None

    def _compute(self, batch: Batch) -> Trace:
        with seeded_parameters(self._engine.module, self._settings.seed):
            return self._probe.compute(batch, STEP)

    # --- recording ------------------------------------------------------------------------------------------------

    def _record(self, step: int) -> None:
        began = time.monotonic()
        own = self._together(lambda: self._own_part(step))
        digests = gather_objects(digest(own.trace), self._world)
        others = [rank for rank, one in enumerate(digests) if one != digests[self._dims.at(rank).first_replica_rank]]
        if others:
            raise TraceError(
                f"golden.record: rank {others[0]} computes other than the first replica: this hardware cannot be "
                "trusted. Set golden.path to null; an audit says which rank is wrong"
            )
        packed = self._together(lambda: pack(own) if self._dims.dp_rank == 0 else None)
        parts = self._gather_parts(packed)
        self._together(lambda: save_parts(self._path, self._training.algorithm.name, parts) if parts else None)
        seconds = round(time.monotonic() - began, 3)
        self._tell("golden", "recorded", step=step, path=str(self._path), results=len(own.trace), seconds=seconds)
        if self._dims.rank == 0:
            logger.info("step %d: recorded %s; verify with golden.record false", step, self._path)

    def _gather_parts(self, packed: Packed | None) -> dict[tuple[int, int], Packed]:
        """On rank 0 the parts of all stages and tensor ranks, elsewhere none."""
        gathered = gather_objects_on(0, packed, self._world)
        places = [(self._dims.at(rank), one) for rank, one in enumerate(gathered or ())]
        return {(place.pp_rank, place.tp_rank): one for place, one in places if one is not None}

    def _own_part(self, step: int) -> Part:
        batch = self._probe.share(step, self._dims.first_replica_rank, self._copies)
        trace, again = (self._compute(batch) for _ in range(2))
        if bad := self._finite.take(self._dims):
            raise ConfigError(
                f"golden.record: got true, and with seeded parameters {bad.address} is {bad.kind}, so that later "
                "results say nothing; choose another golden.seed, or set golden.path to null."
            )
        if wrong := compare_run(trace, again, self._cells).finding.first:
            raise ConfigError(
                f"golden.record: got true, and {wrong} is not the same when computed twice, so that it cannot be "
                "compared; take it out by audit.submodules, or set golden.path to null."
            )
        return Part(self._key, evaluated(self._engine.module), batch, trace)

    # --- verification ---------------------------------------------------------------------------------------------

    def _verify(self, step: int) -> Iterable[Settled]:
        began = time.monotonic()
        runs = [[one] for one in self._run_all()]
        if any(one.finding.key for of_rank in runs for one in of_rank):
            for _ in range(self._repeats):
                runs = [[*old, new] for old, new in zip(runs, self._run_all(), strict=True)]
        gaps = GAPS if self._dims.tensor > 1 else ()
        judged = [
            judge_replicas([of_rank[number].finding for of_rank in runs], self._cells, gaps)
            for number in range(len(runs[0]))
        ]
        answer = GoldenAnswer(runs, 1, judged, time.monotonic() - began)
        rulings = answer.rulings(step, self._training.suspects.ranks)
        name, compared = ("differs" if rulings else "agreed"), answer.compared
        self._tell("golden", name, step=step, compared=compared, seconds=round(answer.seconds, 3))
        if rulings:
            yield Settled("golden", None, rulings, compared, answer.counts)

    def _run_all(self) -> list[GoldenRun]:
        return gather_objects(self._together(self._run), self._world)

    def _run(self) -> GoldenRun:
        assert self._part is not None, "it was read when the guard was attached"
        if other := set(evaluated(self._engine.module)) ^ set(self._part.evaluated):
            raise TraceError(
                f"golden.path: {min(other)} was in training mode when {self._path} was recorded and is not now, or the "
                "other way round; train as then, record it again, or set golden.path to null"
            )
        got, wanted = self._compute(self._part.batch), self._part.trace
        if got.addresses != wanted.addresses:
            pairs = set(got.addresses) ^ set(wanted.addresses)
            raise TraceError(
                f"golden.path: the model computes other results than {self._path} has, such as "
                f"{min(map(str, pairs), default='the same ones in another order')}; record it again, or set "
                "golden.path to null"
            )
        return compare_run(wanted, got, self._cells)

    def _together(self, action: Callable[[], T]) -> T:
        """What an action returns; an error on one rank is raised on all, so that none waits for it."""
        found: list[T] = []
        problem: tuple[type[MegasdcError], str] | None = None
        try:
            found.append(action())
        except (ConfigError, TraceError, StorageError) as error:
            problem = type(error), str(error)
        for rank, (of_rank, host) in enumerate(gather_objects((problem, socket.gethostname()), self._world)):
            if of_rank is not None:
                kind, text = of_rank
                raise kind(text if kind is ConfigError else f"rank {rank} on {host}: {text}")
        return found[0]
