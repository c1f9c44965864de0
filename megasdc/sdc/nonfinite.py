"""The first NaN or Inf of a step over all ranks: its detection, its facts, and whether it was reproduced.

Detection takes two numbers a result, on a device kept there and read all at once. Nothing is repaired here: a
non-finite value may mean a diverged model.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.common.words import ranges
from megasdc.model.submodules import InputProbe, Named
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import execution_key
from megasdc.tensors.bits import checkable, is_surely_finite, kind_of_extremes, non_finite_kind, start_extremes

if TYPE_CHECKING:
    from megasdc.sdc.host import Host


@dataclass(frozen=True)
class NonFinite:
    """A result with elements that are not finite.

    Args:
        place: number of results that its rank recorded before it.
        kind: ``NAN`` or ``INF`` of ``megasdc.tensors.bits``.
    """

    address: Address
    place: int
    kind: str


class FiniteRecorder:
    """A listener of ``engine.observer.Observer`` that records whether results are finite, and changes nothing."""

    def __init__(self) -> None:
        self._seen = 0
        self._addresses: list[tuple[int, Address]] = []
        """Addresses of results that may not be finite, each with the number of results before it."""
        self._values: list[Tensor] = []

    def __call__(self, address: Address, result: Tensor) -> None:
        """Record one result.

        Sync: none.
        """
        if not checkable(result):
            return
        if result.device.type != "cpu" or not is_surely_finite(result):
            self._addresses.append((self._seen, address))
            self._values += start_extremes(result)
        self._seen += 1

    def pop_first(self, dims: ParallelDims) -> NonFinite | None:
        """This rank's first non-finite result since the last call, in execution order.

        Sync: waits for the device once.
        """
        self._seen = 0
        if not self._values:
            return None
        found = []
        addresses, values = self._addresses, torch.stack([one.double() for one in self._values])
        self._addresses, self._values = [], []
        extremes = values.view(-1, 2)
        for place in (~extremes.isfinite().all(1)).nonzero().flatten().tolist():
            kind = kind_of_extremes(*extremes[place].tolist())
            assert kind is not None, "one of the two extremes is not finite"
            number, address = addresses[place]
            found.append(NonFinite(address, number, kind))
        return min(found, key=lambda one: execution_key(one.address, one.place, dims), default=None)


def first_non_finite(found: Sequence[NonFinite | None], layout: ParallelDims) -> tuple[int, NonFinite] | None:
    """The first non-finite result over all ranks, in execution order.

    Replicas do not influence each other within a micro-batch; of two at the same place the lower rank is taken.

    Args:
        found: by global rank; None: all results were finite.

    Returns:
        The rank and its result; None where all ranks' results were finite.
    """
    keyed = []
    for rank, one in enumerate(found):
        if one is not None:
            dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)
            keyed.append((execution_key(one.address, one.place, dims), rank, one))
    return min(keyed, key=lambda item: item[:2])[1:] if keyed else None


EVENT_KIND = "nonfinite"


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The first non-finite result, with facts from its rank.

    ``inputs_finite`` is None where not known. ``inputs_read``: inputs were read, in a repeat; else they are judged by
    the checked results before this one, which were all finite. ``meaning``: of a result that is of no submodule, as a
    sentence that is the same for all of its kind.
    """

    found: NonFinite
    host: str
    inputs_finite: bool | None
    inputs_read: bool
    parameters_finite: bool
    meaning: str | None = None


def origin_here(
    found: NonFinite, inputs_finite: bool | None, parameters: Sequence[Tensor], *, inputs_read: bool
) -> NonFiniteOrigin:
    """Facts on a non-finite result of this rank.

    Args:
        parameters: parameters of the result's submodule.

    Sync: waits for the device.
    """
    return NonFiniteOrigin(found, socket.gethostname(), inputs_finite, inputs_read, non_finite_kind(parameters) is None)


class InputKinds:
    """Keeps whether each submodule's inputs are finite: two numbers a tensor, but no tensor."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[list[Tensor]]] = {}
        self._fqns: set[str] = set()

    def watch_inputs(self, submodules: Iterable[Named]) -> AbstractContextManager[Any]:
        """Context in which the inputs of submodules are looked at."""
        watched = [one for one in submodules if one.module is not None]
        self._fqns = {one.fqn for one in watched}
        return InputProbe(watched, self._record)

    def clear(self) -> None:
        """Forget the inputs of the last micro-batch."""
        self._seen.clear()

    def finite(self, address: Address, time: int = 0) -> bool | None:
        """Whether the inputs of the submodule with the first non-finite result were finite; None: not known.

        The inputs of what is no module, such as activation and loss, are the result before theirs, which was finite.

        Args:
            time: number of the submodule's call in the micro-batch, from 0.
        """
        if address.fqn not in self._fqns:
            return True
        phase = FORWARD if address.phase in (FORWARD, RECOMPUTE) else BACKWARD
        times = self._seen.get((phase, address.fqn), [])
        time += int(address.phase == RECOMPUTE)
        return non_finite_kind(times[time]) is None if len(times) > time else None

    def _record(self, phase: str, fqn: str, tensors: list[Tensor]) -> None:
        kept = [value for one in tensors if checkable(one) for value in start_extremes(one)]
        self._seen.setdefault((phase, fqn), []).append(kept)


@dataclass(frozen=True)
class Explanation:
    """Rank and place at which values became NaN or Inf.

    Args:
        rank: rank of the first such result; None: none was found.
        reproduced: whether it came again when the step was recomputed; None: nothing was recomputed.
        gradients_of: ranks whose reduced gradients were NaN or Inf; empty: not known.
    """

    rank: int | None
    origin: NonFiniteOrigin | None
    reproduced: bool | None
    gradients_of: tuple[int, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the event, in plain values."""
        origin = self.origin
        address = None if origin is None else origin.found.address
        return {
            "micro_batch": None if address is None else address.micro_batch,
            "rank": self.rank,
            "host": None if origin is None else origin.host,
            "phase": None if address is None else address.phase,
            "fqn": None if address is None else address.fqn,
            "slot": None if address is None else address.slot,
            "value": None if origin is None else origin.found.kind,
            "inputs_finite": None if origin is None else origin.inputs_finite,
            "inputs_read": None if origin is None else origin.inputs_read,
            "parameters_finite": None if origin is None else origin.parameters_finite,
            "reproduced": self.reproduced,
        }

    @property
    def gradients(self) -> str:
        """Text on the reduced gradients that were NaN or Inf."""
        if not self.gradients_of:
            return "the gradients"
        return f"the reduced gradients of rank{'s' * (len(self.gradients_of) > 1)} {ranges(self.gradients_of)}"

    @property
    def text(self) -> str:
        """The explanation as a sentence for people."""
        if self.origin is None:
            if self.reproduced is None:
                return "no checked result was NaN or Inf; overflow is normal while the loss scale adapts"
            what = f"NaN or Inf in {self.gradients}" if self.gradients_of else "NaN or Inf in the loss or the gradients"
            return f"not reproduced: {what}; the step's micro-batches, recomputed, were finite everywhere"
        inputs = {
            True: "its inputs were finite",
            False: "its inputs were not finite either",
            None: "its inputs are unknown",
        }
        again = {True: "reproduced", False: "not reproduced when recomputed", None: "not recomputed"}
        parameters = "" if self.origin.parameters_finite else ", its parameters are not finite"
        return (
            f"{self.origin.found.kind} first at {self.origin.found.address} on rank {self.rank} ({self.origin.host}): "
            f"{inputs[self.origin.inputs_finite]}{parameters}, {again[self.reproduced]}"
        )


def explain_origins(
    before: Sequence[NonFiniteOrigin | None],
    after: Sequence[NonFiniteOrigin | None] | None,
    order: Sequence[str],
    dims: ParallelDims,
) -> Explanation:
    """Find the first place over all ranks.

    Args:
        before: first non-finite results by rank, from the checks of the step.
        after: the same when its micro-batches were recomputed with all checks; None: they were not.
        order: names of submodules, in the order in which they are computed.
    """
    repeats = [None] * len(before) if after is None else after
    at_first, again = (first_non_finite([_result(one) for one in side], dims) for side in (before, repeats))
    if again is not None and (at_first is None or _key(again, order, dims) <= _key(at_first, order, dims)):
        return Explanation(again[0], repeats[again[0]], True)
    reproduced = None if after is None else False
    if at_first is None:
        return Explanation(None, None, reproduced)
    return Explanation(at_first[0], before[at_first[0]], reproduced)


Recompute = Callable[[int], tuple[NonFiniteOrigin | None, str | None]]
"""Recomputes a micro-batch on all ranks: this rank's first non-finite result; why it was not computed to the end."""


def find_first(
    host: Host, seen: NonFiniteOrigin | None, micro_batches: int, recompute: Recompute, order: Sequence[str]
) -> tuple[Explanation, list[str]]:
    """Find the first NaN or Inf of a step over all ranks; micro-batches are recomputed up to the first that has some.

    Args:
        seen: this rank's first non-finite result, by the checks of the step.
        micro_batches: number of this rank's micro-batches that are recomputed; 0 on all ranks: none.
        recompute: called with the number of each micro-batch that some rank has.
        order: names of submodules, in the order in which they are computed.

    Returns:
        The place, and the micro-batches that were not computed to the end, a sentence each.

    Collective: all ranks of the world.
    """
    before = gather_objects((seen, micro_batches), host.host_group)
    after: list[NonFiniteOrigin | None] | None = None
    lacks: list[str] = []
    for number in range(max(count for _, count in before)):
        of_ranks = gather_objects(recompute(number), host.host_group)
        missing = [f"micro-batch {number} of rank {rank}: {one}" for rank, (_, one) in enumerate(of_ranks) if one]
        lacks += missing[:1]
        if any(one is None for _, one in of_ranks) or any(one for one, _ in of_ranks):
            after = [one for one, _ in of_ranks]
        if after is not None and any(after):
            break
    return explain_origins([one for one, _ in before], after, order, host.dims), lacks


def _result(origin: NonFiniteOrigin | None) -> NonFinite | None:
    return None if origin is None else origin.found


def _key(of_rank: tuple[int, NonFinite], order: Sequence[str], dims: ParallelDims) -> tuple[Any, ...]:
    """Sort key that orders results of the step's checks and of a repeat's, which count places differently."""
    rank, one = of_rank
    place = order.index(one.address.fqn) if one.address.fqn in order else 0
    backwards = one.address.phase in (BACKWARD, WEIGHT_GRAD)
    return execution_key(one.address, len(order) - place if backwards else place, dims.at(rank))
