"""Search for the first NaN or Inf over all ranks; micro-batches are rerun to find it.

Nothing is repaired here: a non-finite value may mean a diverged model. The search reports where it appeared, and
whether that repeats.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megasdc.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.run import Run
from megasdc.model.inputs import InputProbe
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.compare import execution_key
from megasdc.sdc.finite import FiniteRecorder, NonFinite, first_of, kind_of
from megasdc.train.detection.observe import Observation

logger = logging.getLogger(__name__)

EVENT_KIND = "nonfinite"


@dataclass(frozen=True)
class Origin:
    """The first non-finite result, with facts from its rank.

    ``inputs_finite`` is None where not known. ``inputs_read``: inputs were read, in a repeat; else they are judged by
    the checked results before this one, which were all finite.
    """

    found: NonFinite
    host: str
    inputs_finite: bool | None
    inputs_read: bool
    parameters_finite: bool


class NonFiniteSearch:
    """Reruns a step's micro-batches with all checks when a result was not finite, and reports the first such result."""

    def __init__(self, run: Run, observation: Observation, rehearse: Callable[[TrainingEngine, int], Any]) -> None:
        self._dims = run.dims
        self._group = run.host_group
        self._events = run.events
        self._observation = observation
        self._rehearse = rehearse
        self._submodules = list_submodules(run.engine.module)
        self._modules = {one.fqn for one in self._submodules if one.module is not None}
        self.place: str | None = None

    def begin(self) -> None:
        """A step begins."""
        self.place = None

    def explain(self, engine: TrainingEngine, seen: NonFinite | None, *, repeat: bool) -> None:
        """Find and report the first place over all ranks, and store it as a sentence in ``place``; may rehearse.

        ``seen``: result of this rank, by the checks of the step; ``repeat``: micro-batches are recomputed with all
        checks, the same on all ranks.

        Collective: all ranks of the world.
        """
        before = gather_objects(None if seen is None else self._origin(seen, True, inputs_read=False), self._group)
        after = self._repeat(engine) if repeat else [None] * len(before)
        candidates = [
            first_of([None if one is None else one.found for one in side], self._dims) for side in (before, after)
        ]
        if candidates == [None, None]:
            self._conclude(engine.step_number, None, None, False if repeat else None, engine)
            return
        at_first, again = candidates
        if at_first is None or (again is not None and self._key(again) <= self._key(at_first)):
            assert again is not None, "one of the two was found"
            self._conclude(engine.step_number, again[0], after[again[0]], True, engine)
        else:
            self._conclude(engine.step_number, at_first[0], before[at_first[0]], False if repeat else None, engine)

    def _key(self, of_rank: tuple[int, NonFinite]) -> tuple[Any, ...]:
        """Order between the checks of the step and those of a repeat, which count places differently."""
        rank, one = of_rank
        order = [submodule.fqn for submodule in self._submodules]
        place = order.index(one.address.fqn) if one.address.fqn in order else 0
        backwards = one.address.phase in (BACKWARD, WEIGHT_GRAD)
        return execution_key(one.address, len(order) - place if backwards else place, self._dims.at(rank))

    # --- the repeat ---------------------------------------------------------------------------------------------

    def _repeat(self, engine: TrainingEngine) -> list[Origin | None]:
        """By rank, the first non-finite result when the step's micro-batches are recomputed."""
        recorder = FiniteRecorder()
        inputs: dict[tuple[str, str], list[list[Tensor]]] = {}

        def take_in(phase: str, fqn: str, tensors: list[Tensor]) -> None:
            inputs.setdefault((phase, fqn), []).append([one.detach().clone() for one in tensors])

        found: list[Origin | None] = []
        with self._observation.everything(recorder), InputProbe(self._submodules, take_in):
            for micro_batch in range(max(gather_objects(engine.completed, self._group))):
                inputs.clear()
                self._rehearse(engine, micro_batch)
                own = recorder.take(self._dims)
                origin = (
                    None
                    if own is None
                    else self._origin(own, self._inputs_finite(own.address, inputs), inputs_read=True)
                )
                found = gather_objects(origin, self._group)
                if any(found):
                    break
        return found

    def _inputs_finite(self, address: Address, inputs: dict[tuple[str, str], list[list[Tensor]]]) -> bool | None:
        """Whether the inputs of the submodule with the first non-finite result were finite.

        The inputs of activation and loss are the result before theirs, which was finite then.
        """
        if address.fqn not in self._modules:
            return True
        phase = FORWARD if address.phase in (FORWARD, RECOMPUTE) else BACKWARD
        times = inputs.get((phase, address.fqn), [])
        time = 1 if address.phase == RECOMPUTE else 0
        return kind_of(times[time]) is None if len(times) > time else None

    def _origin(self, found: NonFinite, inputs_finite: bool | None, *, inputs_read: bool) -> Origin:
        parameters = [
            parameter.data
            for submodule in self._submodules
            if submodule.fqn == found.address.fqn
            for parameter in submodule.parameters.values()
        ]
        return Origin(found, socket.gethostname(), inputs_finite, inputs_read, kind_of(parameters) is None)

    # --- what is told -------------------------------------------------------------------------------------------

    def _conclude(
        self, step: int, rank: int | None, origin: Origin | None, reproduced: bool | None, engine: TrainingEngine
    ) -> None:
        self.place = say(rank, origin, reproduced)
        if self._dims.rank != 0 or (origin is None and reproduced is None):
            return
        logger.warning("step %d: %s", step, self.place)
        address = None if origin is None else origin.found.address
        self._events.emit(
            EVENT_KIND,
            "first",
            step=step,
            micro_batch=None if address is None else address.micro_batch,
            rank=rank,
            host=None if origin is None else origin.host,
            phase=None if address is None else address.phase,
            fqn=None if address is None else address.fqn,
            slot=None if address is None else address.slot,
            value=None if origin is None else origin.found.kind,
            inputs_finite=None if origin is None else origin.inputs_finite,
            inputs_read=None if origin is None else origin.inputs_read,
            parameters_finite=None if origin is None else origin.parameters_finite,
            reproduced=reproduced,
        )


def say(rank: int | None, origin: Origin | None, reproduced: bool | None) -> str:
    """Rank and place at which values became NaN or Inf, as a sentence for people.

    ``rank`` None: no such result was found; ``reproduced`` None: it was not recomputed.
    """
    if origin is None:
        if reproduced is None:
            return "no checked result was NaN or Inf; overflow is normal while the loss scale adapts"
        return "not reproduced: the step's micro-batches, recomputed, were finite everywhere"
    inputs = {
        True: "its inputs were finite",
        False: "its inputs were not finite either",
        None: "its inputs are unknown",
    }
    again = {True: "reproduced", False: "not reproduced when recomputed", None: "not recomputed"}
    parameters = "" if origin.parameters_finite else ", its parameters are not finite"
    return (
        f"{origin.found.kind} first at {origin.found.address} on rank {rank} ({origin.host}): "
        f"{inputs[origin.inputs_finite]}{parameters}, {again[reproduced]}"
    )
