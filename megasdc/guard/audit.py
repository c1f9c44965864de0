"""Audits of a guarded training: one batch on all replicas, and what follows where its results differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from megasdc.config.sections.guard import GuardSettings
from megasdc.errors import ConfigError
from megasdc.guard.copies import judge_copies, read_copies
from megasdc.guard.probe import Batch, Probe
from megasdc.guard.record import Recorder, Watched
from megasdc.guard.referee import build_referee
from megasdc.parallel.agreement import Agreed, compare_replicas
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.audits.findings import AuditFindings, Moved, Work
from megasdc.sdc.audits.places import Places
from megasdc.sdc.evidence import count_differing
from megasdc.sdc.gather import gather_traces
from megasdc.sdc.incidents.settled import Settled
from megasdc.sdc.trace import Trace, digest
from megasdc.tensors.checksum import default_algorithm


@dataclass(frozen=True)
class Audited:
    """What an audit has computed on this rank, and how ranks compare.

    Args:
        copies: what replicas hold alike.
        moved: the batch with elements in other places; None: it was not computed so.
        agreed: of results and copies, and whether any rank's results changed when elements were moved.
    """

    step: int
    batch: Batch
    results: Trace
    copies: Trace
    moved: Moved | None
    agreed: Agreed


class Auditor:
    """Computes audits, and rules on what they find.

    Args:
        watched: submodules whose results are compared.
        world: a host group of all ranks.
        copies: a host group of those that hold the same parameters as this one.
        wanted: returns the step that runs, where this rank's batch of it is audited; else None.
        tell: writes an event on rank 0, from its kind, name and fields.
    """

    def __init__(
        self,
        engine: Any,
        settings: GuardSettings,
        watched: Sequence[Watched],
        dims: ParallelDims,
        world: dist.ProcessGroup | None,
        copies: dist.ProcessGroup | None,
        wanted: Callable[[], int | None],
        tell: Callable[..., None],
    ) -> None:
        self._engine, self._dims, self._world, self._copies = engine, dims, world, copies
        self._modules = _modules_of(engine.module)
        self._algorithm = default_algorithm(engine.device)
        recorder = Recorder(engine.module, watched, self._algorithm)
        self._probe = Probe(engine.module, engine.device, recorder, settings.audit.seed, wanted)
        referee, sdc = build_referee(engine.module, self._probe, dims.rank, world), settings.sdc
        recorder.listener = referee.listen
        self._findings = AuditFindings(*(dims, world, sdc.repeats, referee, partial(tell, "sdc")), asks=sdc.referee)
        self._places = Places(dims, world, tell) if settings.audit.permuted else None

    def close(self) -> None:
        """Look at no further forward pass."""
        self._probe.close()

    def compute(self, step: int, source: int) -> Audited:
        """Compute the batch of a step of a replica, on all, and compare.

        Raises:
            ConfigError: it cannot be computed; on all ranks.

        Collective: all ranks of the world.
        """
        dims, problem, own, batch = self._dims, None, Trace(), None
        copies = read_copies(self._engine, self._algorithm, step)
        try:
            batch = self._probe.share(step, dims.first_replica_rank + source * dims.tensor, self._copies)
            self._check_model()
            own = self._probe.compute(batch, step)
        except ConfigError as error:
            problem = error.problems
        if problems := [one for one in gather_objects(problem, self._world) if one]:
            raise ConfigError(problems[0])
        assert batch is not None, "no rank has a problem"
        moved = self._move(batch, step)
        matters = moved is not None and digest(moved.trace) != digest(own)
        agreed = compare_replicas([digest(own), digest(copies)], [matters], dims, self._world)
        return Audited(step, batch, own, copies, moved, agreed)

    def settle(self, audited: Audited, earlier: Collection[int]) -> Iterator[Settled]:
        """What an audit has found, with rulings, each settled once it is asked for; nothing: all agrees.

        Args:
            earlier: ranks that were wrong in an earlier event.

        Collective: all ranks of the world.
        """
        (results, copies), (matters,) = audited.agreed.differing, audited.agreed.raised
        if copies:  # ranks with other parameters compute other results
            yield self._settle_copies(audited)
            return
        step, batch = audited.step, audited.batch
        work = Work(step, audited.results, lambda: self._probe.compute(batch, step, uses=True), earlier)
        if matters and audited.moved is not None:
            yield self._findings.of_permuted(work, audited.moved)
        if results:
            yield self._findings.of_replicas(work)

    def _move(self, batch: Batch, step: int) -> Moved | None:
        """The batch with elements in other places, where that is asked for."""
        if (places := self._places) is None:
            return None

        def compute() -> Trace:
            return self._probe.compute(batch, step)

        def again() -> Trace:
            return places.compute(step, compute)

        return Moved(again(), again, lambda: places.learn(step, compute))

    def _settle_copies(self, audited: Audited) -> Settled:
        again = read_copies(self._engine, self._algorithm, audited.step)
        found, repeated = (gather_traces(one, self._dims, self._world) for one in (audited.copies, again))
        rulings = judge_copies(found, repeated, self._dims)
        named = [one.rank for one in rulings if one.rank is not None]
        return Settled("parameters", None, rulings, *count_differing(found, self._dims, named))

    def _check_model(self) -> None:
        """Refuse to audit a model whose submodules are others than when the guard was attached."""
        now = _modules_of(self._engine.module)
        if now != self._modules:
            other = sorted(now.items() ^ self._modules.items())
            raise ConfigError(
                f"engine: submodule {other[0][0]} of its model was added, removed or replaced after the guard was "
                "attached; close the guard before, and attach again."
            )


def _modules_of(model: Any) -> dict[str, int]:
    return {fqn: id(module) for fqn, module in model.named_modules()}
