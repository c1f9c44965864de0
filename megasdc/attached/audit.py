"""Audits of a guarded training: one batch on all replicas, and what follows where its results differ.

The referee judges PyTorch's own submodules by what they should compute, others by their own code run again. Buffers
that all replicas hold alike and nothing writes to, such as frequencies of a rotation, are compared too: an audit
computes with the buffers of one replica on all, so that a bit that has flipped in one shows in no result.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasdc.attached.batch_replayer import Batch, BatchReplayer
from megasdc.attached.copies import COPIES, read_copies, rule_on_copies
from megasdc.attached.record import ROOT, ResultRecorder
from megasdc.attached.training import Protection, Training
from megasdc.common.addresses import PARAMETER, WEIGHT_GRAD, Address
from megasdc.common.errors import ConfigError
from megasdc.config.sections import STANDARD
from megasdc.parallel.collectives import ANY, Agreed, Compared, compare_replicas, gather_objects
from megasdc.sdc.audits import AuditedWork, AuditFindings, PermutableOps, PermutedResult
from megasdc.sdc.budget import CheckBudget
from megasdc.sdc.finding import Finding
from megasdc.sdc.golden import machine_key
from megasdc.sdc.host import find_comparable
from megasdc.sdc.referee.foreign import HOOKS, is_plain, make_plain, own_result, result_between, tied_words
from megasdc.sdc.referee.recompute import Call, Exhibit
from megasdc.sdc.referee.referee import Make, Referee, Subject
from megasdc.sdc.trace import Trace, trace_digest
from megasdc.tensors.checksum import ChecksumAlgorithm, read_back

MOST_MOVES = 2
"""Number of comparisons that find a buffer written to, from which on it is not compared; a load counts as one."""


@dataclass(frozen=True)
class BufferState:
    """A buffer of one rank.

    Args:
        memory: id of the object, address of its data, and its version, which counts writes.
        checksum: checksum of its values.
    """

    memory: tuple[int, int, int | None]
    checksum: int


class StillBuffers:
    """Compares buffers with their values when these were equal on all replicas.

    Args:
        gather: gathers a value from each rank that holds the same parameters.

    Collective: the ranks that hold the same parameters.
    Sync: waits for the device.
    """

    def __init__(self, model: nn.Module, algorithm: ChecksumAlgorithm, gather: Callable[[Any], list[Any]]) -> None:
        self._model, self._algorithm, self._gather = model, algorithm, gather
        self._moves: Counter[str] = Counter()
        self._before: dict[str, BufferState] = {}
        self._alike: tuple[str, ...] = ()
        self._now: dict[str, BufferState] = self._read()
        self._record_alike(gather({name: one.checksum for name, one in self._now.items()}))

    def read(self) -> tuple[int, bool]:
        """Checksum of the buffers that were equal on all replicas, and whether this rank has written to any since."""
        self._now = self._read()
        moved = any(one not in self._now or self._now[one].memory != self._before[one].memory for one in self._alike)
        return trace_digest(self.trace(0, self._alike)), moved

    def differing(self) -> list[str]:
        """Names of buffers that differ between replicas though nothing has written to them, after a ``read``.

        A buffer that any rank has written to is not counted, such as statistics of a batch norm. Nor is one that has
        changed on more ranks than have it unchanged.

        Collective: the ranks that hold the same parameters.
        """
        present = {name: one for name, one in self._now.items() if name in self._before}
        own = {name: (one.memory == self._before[name].memory, one.checksum) for name, one in present.items()}
        found: Sequence[Mapping[str, tuple[bool, int]]] = self._gather(own)
        lost = {name for name in self._alike if any(name not in of_rank for of_rank in found)}
        written = {name for name in self._alike if name not in lost and any(not one[name][0] for one in found)}
        for name in list(written):  # of a submodule of which one is written to, others may be by operations of a device
            written |= {one for one in self._alike if one.rpartition(".")[0] == name.rpartition(".")[0]}
        self._moves.update(written)
        changed = []
        for name in self._alike:
            if name in lost | written:
                continue
            as_it_was = sum(one[name][1] == self._before[name].checksum for one in found)
            if as_it_was < len(found):
                self._moves[name] = MOST_MOVES  # told once
                changed += [name] if 2 * as_it_was >= len(found) else []
        self._record_alike(self._gather({name: one.checksum for name, one in self._now.items()}))
        return changed

    def trace(self, step: int, names: Collection[str], *, again: bool = False) -> Trace:
        """Checksums of buffers, addressed as of a step; ``again``: whether they are read once more."""
        held = self._read() if again else self._now
        parts = [(name, *name.rpartition(".")[::2]) for name in names if name in held]
        addresses = [Address(step, None, PARAMETER, fqn or ROOT, f"buffer {slot}") for _, fqn, slot in parts]
        return Trace(addresses, [held[name].checksum for name, *_ in parts])

    def _record_alike(self, found: Sequence[Mapping[str, int]]) -> None:
        names = [name for name in self._now if self._moves[name] < MOST_MOVES]
        self._alike = tuple(name for name in names if len({one.get(name) for one in found}) == 1)
        self._before = {name: self._now[name] for name in self._alike}

    def _read(self) -> dict[str, BufferState]:
        named: list[tuple[str, Tensor]] = [(name, one.detach()) for name, one in self._model.named_buffers()]
        usable = [(name, one) for name, one in named if one.layout == torch.strided and not one.is_meta and one.numel()]
        checksums = read_back([self._algorithm.start(_real(one)) for _, one in usable])
        objects: Mapping[str, Any] = dict(self._model.named_buffers())
        return {
            name: BufferState((id(objects[name]), one.data_ptr(), _version(one)), checksum)
            for (name, one), checksum in zip(usable, checksums, strict=True)
        }


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


logger = logging.getLogger(__name__)

CONTAINERS = nn.ModuleList, nn.ModuleDict
"""Classes of submodules that compute nothing."""


def build_guard_referee(model: Any, probe: BatchReplayer, rank: int, group: dist.ProcessGroup | None) -> Referee:
    """The referee of a model that a replayer of batches computes.

    Args:
        probe: the replayer, which counts the uses of parameters.
        group: host group of all ranks.
    """
    modules = dict(model.named_modules())
    hooked = {fqn for fqn, module in modules.items() if _has_hooks(module)}

    def uses(name: str) -> int:
        return probe.uses.get(name, 0)

    return Referee(partial(subject_of, modules, hooked, uses), rank, group)


def subject_of(
    modules: Mapping[str, nn.Module], hooked: Collection[str], uses: Callable[[str], int], fqn: str
) -> Subject | None:
    """A submodule, as the referee judges it.

    It is judged by what it is known to compute, then by its own code, and, where its inputs differ already, by the code
    of the submodules around it, from the inside out.

    Args:
        modules: submodules of a model by full name; the model itself has the empty name.
        hooked: names of submodules that had hooks of their own when a guard was attached, and may compute something
            else than their class: they are judged by their own code alone, which is not trusted where others agree on
            other results.
        uses: returns the number of operations that have used a parameter, from its full name.
    """
    names = [] if fqn == ROOT else fqn.split(".")
    own = modules.get(".".join(names))
    if own is None:
        return None
    around = {".".join(names[:end]): names[end:] for end in range(len(names) - 1, -1, -1)}
    paths = {name: path for name, path in around.items() if not isinstance(modules[name], CONTAINERS)}
    outer = [modules[name] for name in paths]
    shared = _shares(modules, own)
    kept = [own, *outer, *([] if shared is None else [modules[shared]])]

    def once(address: Address) -> bool:
        return address.phase != WEIGHT_GRAD or uses(f"{address.fqn}.{address.slot}") == 1

    def plain(address: Address, calls: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | str | None:
        if fqn in hooked:  # perhaps on this rank alone: all ranks show the same kinds of exhibits one after the other
            return "it has hooks of its own"
        return make_plain(address, calls[0], result, once(address)) if is_plain(own) else None

    def tied(address: Address, calls: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | str | None:
        of_both = address.phase == WEIGHT_GRAD and uses(f"{address.fqn}.{address.slot}") == 2
        return tied_words(calls[0], calls[-1], result) if of_both and not {fqn, shared} & {*hooked} else None

    def by_code(address: Address, calls: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | str:
        return own_result(address, calls[0], result, once(address))

    def between(place: int, address: Address, calls: Sequence[Sequence[Call]], _: Tensor) -> Exhibit | str:
        return result_between(address, calls[1 + place], calls[0], list(paths.values())[place])

    makes: list[Make] = [tied] if shared is not None else []
    return Subject(kept, [*makes, plain, by_code, *(partial(between, place) for place in range(len(outer)))])


def _has_hooks(module: Any) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def _shares(modules: Mapping[str, nn.Module], own: nn.Module) -> str | None:
    """Name of the other submodule that shares a submodule's weight; None: there is none, or there are several."""
    weight = own._parameters.get("weight")
    found = [name for name, one in modules.items() if one is not own and one._parameters.get("weight") is weight]
    return found[0] if weight is not None and len(found) == 1 else None


RESULTS, BUFFERS, PLACE, NO_RECORDS, WRITTEN = "results", "buffers", "place", "no records", "written"
"""Names in the agreement of an audit: values that must be equal on all replicas (the first three), and flags: results
changed with the place of elements, are missing, and buffers were written to."""


@dataclass(frozen=True)
class Audited:
    """Results of an audit on this rank, and their comparison over all ranks.

    Args:
        copies: checksums of the state that replicas hold alike.
        moved: the batch with elements in other places; None: it was not computed so.
        agreed: comparison of results, copies and buffers over replicas, and flags that any rank has raised.
    """

    step: int
    batch: Batch
    results: Trace
    copies: Trace
    moved: PermutedResult | None
    agreed: Agreed


class GuardAudit(Protection):
    """Part of a guard that audits the first step, and every ``audit.interval``-th.

    Args:
        budget: measures audits where their interval follows what they take; None: it is given.
        agreed: called with the step of each audit in which all ranks agree.

    Attributes:
        count: number of audits that were made.
        agreed: number of those in which all ranks agreed.
    """

    def __init__(self, training: Training, agreed: Callable[[int], None], budget: CheckBudget | None = None) -> None:
        engine, settings, dims, world = training.engine, training.settings, training.dims, training.host_group
        self._training, self._engine, self._dims, self._world = training, engine, dims, world
        self._copies, self._emit, tell = training.copies, training.events.emit_on_rank_0, training.events.emit_on_rank_0
        self._agreed, self._first, self._budget = agreed, training.step, budget
        self.count = self.agreed = 0
        self._may_stop = settings.protect == STANDARD and "enabled" not in settings.audit.model_fields_set
        self._stopped = False
        self._modules = _modules_of(engine.module)
        self._algorithm = training.algorithm
        self._buffers = StillBuffers(engine.module, self._algorithm, partial(gather_objects, group=training.copies))
        recorder = ResultRecorder(engine.module, training.watched, self._algorithm)
        self._probe = BatchReplayer(engine.module, engine.device, recorder, settings.audit.seed, self._wanted)
        referee, sdc = build_guard_referee(engine.module, self._probe, dims.rank, world), settings.sdc
        recorder.listener = referee.listen
        to_sdc, asks = partial(tell, "sdc"), sdc.referee
        self._findings = AuditFindings(dims, world, sdc.repeats, referee, to_sdc, asks=asks, sums=True)
        self._places = PermutableOps(dims, world, tell) if settings.audit.permutes(dims.data) else None
        self._comparable = find_comparable(training, machine_key())
        """Positions (pp_rank, tp_rank) of which all replicas have the same hardware and versions."""

    def close(self) -> None:
        """Remove the hook on forward passes."""
        self._probe.close()

    def before_step(self, step: int) -> Iterable[Finding]:
        """Audit a step that is due; returns findings, each of which is settled once the caller asks for it.

        Raises:
            ConfigError: the batch cannot be computed, and audits are not there by the word `standard` alone; on all
                ranks.

        Collective: all ranks of the world.
        """
        if (source := self._source(step)) is None:
            return
        began = time.monotonic()
        try:
            with nullcontext() if self._budget is None else self._budget.audits:
                audited = self._compute(step, source)
        except ConfigError as error:
            if self.count or not self._may_stop:
                raise
            self._stop(step, error)
            return
        self.count += 1
        agreed = True
        for found in self._settle(audited):
            if found.rulings:
                agreed = False
                yield found
        if agreed and audited.agreed[NO_RECORDS]:
            self._emit("sdc", "audit_void", step=step, reason="a rank has recorded no result of it")
        elif agreed and len(self._comparable) < self._dims.pipeline * self._dims.tensor:
            self._emit("sdc", "audit_void", step=step, reason="replicas differ in hardware or versions")
        elif agreed:
            self.agreed += 1
            self._agreed(step)
            seconds = round(time.monotonic() - began, 3)
            self._emit("audit", "agreed", step=step, compared=len(audited.results), seconds=seconds)

    def _stop(self, step: int, error: ConfigError) -> None:
        """Audit nothing from now on, since the model cannot be computed beside training; the word alone has asked."""
        self._stopped = True
        self.close()
        reason = " ".join(str(error).split())
        self._emit("guard", "not_audited", step=step, reason=reason)
        if self._dims.rank == 0:
            logger.warning("guard: nothing is audited, and no checkpoint verified: %s", reason)

    def go_on(self) -> None:
        """Begin again after a checkpoint was loaded; if nothing was audited before, the next step is the first."""
        if self.count == 0:
            self._first = self._training.step

    def is_audit(self, step: int) -> bool:
        """Whether a step is audited; the same on all ranks."""
        return self._source(step) is not None

    def _source(self, step: int) -> int | None:
        """Replica whose batch is audited in a step, another one each time; None: the step is not audited."""
        interval = self._training.settings.audit.interval * (1 if self._budget is None else self._budget.audit_factor)
        if self._stopped or (step != self._first and step % interval):
            return None
        return step // interval % self._dims.data

    def _wanted(self) -> int | None:
        """Number of the running step, if this rank's batch is audited in it; else None."""
        step = self._training.step
        return step if self._source(step) == self._dims.dp_rank else None

    def _compute(self, step: int, source: int) -> Audited:
        """Compute one replica's batch of a step on all replicas, and compare the results."""
        dims, problem, own, batch = self._dims, None, Trace(), None
        copies, (buffers, moved_on) = read_copies(self._engine, self._algorithm, step), self._buffers.read()
        try:
            batch = self._probe.share(step, dims.first_replica_rank + source * dims.tensor, self._copies)
            self._check_model()
            own = self._probe.compute(batch, step)
        except ConfigError as error:
            problem = error.problems
        written = self._written(copies, step) if self.count == 0 else None  # on all ranks, whatever was raised
        if problems := [one for one in gather_objects(problem or written, self._world) if one]:
            raise ConfigError(problems[0])
        assert batch is not None, "no rank has a problem"
        moved = self._move(batch, step)
        matters = moved is not None and trace_digest(moved.trace) != trace_digest(own)
        flags = {PLACE: matters, NO_RECORDS: not len(own), WRITTEN: moved_on}
        values = {RESULTS: trace_digest(own), COPIES: trace_digest(copies), BUFFERS: buffers}
        compared = {name: Compared(one) for name, one in values.items()}
        compared |= {name: Compared(one, ANY) for name, one in flags.items()}
        agreed = compare_replicas(compared, dims, self._world)
        return Audited(step, batch, own, copies, moved, agreed)

    def _written(self, copies: Trace, step: int) -> list[str] | None:
        """Error message if the model writes into its own parameters when it is computed, on all replicas; None: no.

        Args:
            copies: checksums of the parameters before the model was computed.

        Collective: the ranks that hold the same parameters.
        """
        pairs = zip(copies.addresses, read_copies(self._engine, self._algorithm, step).checksums, strict=True)
        before = dict(zip(copies.addresses, copies.checksums, strict=True))
        own = next((f"{address.fqn}.{address.slot}" for address, now in pairs if now != before[address]), None)
        found = set(gather_objects(own, self._copies))
        if len(found) > 1 or own is None:  # a single rank's was hit by a fault
            return None
        return [
            f"audit.enabled: got true, and the model writes into its parameter {own} whenever it is computed, which "
            "an audit would do, too: register it as a buffer, or set it to false."
        ]

    def _settle(self, audited: Audited) -> Iterator[Finding]:
        """Findings of an audit, with rulings; none if all agrees."""
        agreed = audited.agreed
        if agreed[COPIES]:  # ranks with other parameters compute other results
            yield self._settle_copies(audited)
            return
        if agreed[BUFFERS] or agreed[WRITTEN]:
            yield from self._settle_buffers(audited.step)
        step, batch = audited.step, audited.batch
        earlier = self._training.suspects.ranks
        work = AuditedWork(step, audited.results, lambda: self._probe.compute(batch, step, uses=True), earlier)
        if agreed[PLACE] and audited.moved is not None:
            yield self._findings.of_permuted(work, audited.moved)
        if any(position in self._comparable for position in agreed[RESULTS]):
            yield self._findings.of_replicas(work, self._comparable)

    def _move(self, batch: Batch, step: int) -> PermutedResult | None:
        """Results of the batch with elements in other places; None: not asked for."""
        if (places := self._places) is None:
            return None

        def compute() -> Trace:
            return self._probe.compute(batch, step)

        def again() -> Trace:
            return places.compute(step, compute)

        return PermutedResult(again(), again, lambda: places.update(step, compute))

    def _settle_buffers(self, step: int) -> Iterator[Finding]:
        """Findings of buffers that differ though nothing has written to them; audits use one replica's buffers."""
        names = self._buffers.differing()
        if all_names := sorted({name for of_rank in gather_objects(names, self._world) for name in of_rank}):
            self._emit("guard", "buffers_differ", step=step, buffers=all_names)
            again = self._buffers.trace(step, names, again=True)
            yield rule_on_copies(self._training, self._buffers.trace(step, names), again)

    def _settle_copies(self, audited: Audited) -> Finding:
        again = read_copies(self._engine, self._algorithm, audited.step)
        return rule_on_copies(self._training, audited.copies, again)

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
