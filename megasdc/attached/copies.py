"""Copies of state that all replicas hold alike: parameters, and without ZeRO the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from megasdc.attached.record import ROOT
from megasdc.attached.training import Protection, Training
from megasdc.common.addresses import PARAMETER, UPDATE, Address
from megasdc.parallel.collectives import Compared, compare_replicas
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.audits import gather_traces, merged_rulings
from megasdc.sdc.finding import Finding
from megasdc.sdc.trace import Trace, count_differing, trace_digest
from megasdc.sdc.verdict import INCONCLUSIVE, MAJORITY, NOT_REPRODUCED, PERSISTENT, RankVerdict
from megasdc.sdc.vote import majority
from megasdc.tensors.checksum import ChecksumAlgorithm, read_back

COPIES = "copies"
"""Name, in the agreement of ranks, of the checksums of state that replicas hold alike."""


def read_copies(engine: Any, algorithm: ChecksumAlgorithm, step: int) -> Trace:
    """Checksums of this rank's copies, addressed as of a step.

    Sync: waits for the device once.
    """
    names = {id(parameter): name.rpartition(".") for name, parameter in engine.module.named_parameters()}
    found: list[tuple[Address, Tensor]] = []
    for name, parameter in engine.module.named_parameters():
        fqn, _, slot = name.rpartition(".")
        found.append((Address(step, None, PARAMETER, fqn or ROOT, slot), parameter.detach()))
    if engine.zero_optimization_stage() == 0:
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        held = [one for group in inner.param_groups for one in group["params"]]
        for number, one in enumerate(held):
            fqn, _, slot = names.get(id(one), ("optimizer", ".", str(number)))
            for state, value in sorted(inner.state.get(one, {}).items()):
                if isinstance(value, Tensor):
                    found.append((Address(step, None, UPDATE, fqn or ROOT, f"{slot}.{state}"), value.detach()))
    return Trace([address for address, _ in found], read_back([algorithm.start(value) for _, value in found]))


class GuardCopies(Protection):
    """Part of a guard that compares these copies before each optimizer step.

    Args:
        audited: whether a step is audited, which compares them, too.
    """

    what = "check"
    name = "parameters of all replicas"

    def __init__(self, training: Training, audited: Callable[[int], bool]) -> None:
        self._training, self._audited = training, audited

    def before_step(self, step: int) -> Iterable[Finding]:
        """Compare the copies; a finding where replicas differ.

        Collective: all ranks of the world; one reduction of a few numbers.
        Sync: waits for the device.
        """
        training = self._training
        if self._audited(step):
            return
        held = read_copies(training.engine, training.algorithm, step)
        agreed = compare_replicas({COPIES: Compared(trace_digest(held))}, training.dims, training.host_group)
        if agreed[COPIES]:
            yield rule_on_copies(training, held, read_copies(training.engine, training.algorithm, step))


def rule_on_copies(training: Training, held: Trace, again: Trace) -> Finding:
    """Rule on state that replicas hold alike.

    Args:
        held: checksums of this rank's.
        again: the same, read once more.

    Collective: all ranks of the world.
    """
    dims, group = training.dims, training.host_group
    found, repeated = (gather_traces(one, dims, group) for one in (held, again))
    rulings = judge_copies(found, repeated, dims)
    named = [one.rank for one in rulings if one.rank is not None]
    return Finding("parameters", None, rulings, *count_differing(found, dims, named))


def judge_copies(
    copies: Mapping[int, Trace], again: Mapping[int, Trace], layout: ParallelDims
) -> tuple[RankVerdict, ...]:
    """Rule on copies that differ between replicas, relative to a strict majority of them.

    Args:
        copies: traces of copies by global rank.
        again: the same, read once more.

    Returns:
        A ruling for each rank that differs, at its first such copy, or where there is no majority one without a rank.
        Of ranks of one replica that differ none is named: the norm of the gradients is a sum over them.
    """
    rulings: dict[int, RankVerdict] = {}
    for ranks in layout.positions:
        for place, address in enumerate(copies[ranks[0]].addresses):
            values = {rank: copies[rank].checksums[place] for rank in ranks}
            right = majority(values, len(ranks))
            if right is None:
                unnamed = RankVerdict(None, INCONCLUSIVE, MAJORITY, address, suspects=tuple(ranks), got=values)
                rulings.setdefault(ranks[0], unnamed)
                break
            for rank in (one for one in ranks if values[one] != right):
                stays = again[rank].checksums[place] == values[rank]
                verdict = PERSISTENT if stays else NOT_REPRODUCED
                ruling = RankVerdict(
                    rank, verdict, MAJORITY, address, int(stays), 1, expected=right, got={rank: values[rank]}
                )
                rulings.setdefault(rank, ruling)
    by_replica: dict[tuple[int, ...], list[RankVerdict]] = {}
    for one in rulings.values():
        replicas = {layout.at(rank).dp_rank for rank in ((one.rank,) if one.rank is not None else one.suspects)}
        by_replica.setdefault(tuple(sorted(replicas)), []).append(one)
    return tuple(some[0] if len(some) == 1 else _together(some) for some in by_replica.values())


def _together(rulings: list[RankVerdict]) -> RankVerdict:
    return merged_rulings(rulings, tuple(sorted({rank for one in rulings for rank in one.got})))
