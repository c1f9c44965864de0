"""Observation of every submodule's results on a rank, each with its address.

Listeners are called in the order given: fault injection comes before recording. One observer serves all of them, and is
attached only in steps in which one listens (``ObserverSwitch``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megasdc.common.addresses import (
    ACCUMULATED_GRAD,
    BACKWARD,
    FORWARD,
    PARAMETER,
    RECOMPUTE,
    REDUCED_GRAD,
    UPDATE,
    Address,
)
from megasdc.engine.hooks import Hook, Run
from megasdc.model.submodules import Attachment, Submodule, list_submodules
from megasdc.optim.zero1 import accumulated_gradient, owned_fragments

if TYPE_CHECKING:
    from megasdc.engine.engine import TrainingEngine

Listener = Callable[[Address, Tensor], Tensor | None]
"""Function that gets the address and value of a result; returns None, or the value to use instead, [the same shape]."""


class Observer(Hook):
    """Calls listeners with the results of one rank, in the order in which they are computed.

    While it is attached, forward and backward passes in training are observed; evaluations are not.

    Args:
        engine: engine to whose hooks the observer adds itself, until ``close``.
        submodules: submodules to observe, from ``list_submodules(engine.module)``.
        listeners: called in this order for every result.
        gradients: whether backward results and weight gradients are observed too.
        after: the engine's hook that the observer follows; None, or not among them: it follows all.
        clock: context that is entered around each call of the listeners, to measure it.
        of_replays: listeners of the results of a stage's replay, which the others do not get.

    Collective: none; but with tensor parallelism all ranks of a tensor group must observe the same submodules, because
        the collectives of column-parallel layers are called from another place.
    """

    in_replays = True

    def __init__(
        self,
        engine: TrainingEngine,
        submodules: Sequence[Submodule],
        listeners: Sequence[Listener],
        gradients: bool = True,
        after: Hook | None = None,
        clock: AbstractContextManager[None] | None = None,
        of_replays: Sequence[Listener] = (),
    ) -> None:
        self._undo = ExitStack()
        self._clock = clock or nullcontext()
        self._engine = engine
        self._listeners, self._of_replays = tuple(listeners), tuple(of_replays)
        self._step = 0
        self._micro_batch = 0
        self._pass: str | None = None
        self._names = {
            id(parameter): (submodule.fqn, slot)
            for submodule in submodules
            for slot, parameter in submodule.parameters.items()
        }
        self._parameters = [
            (submodule.fqn, slot, parameter)
            for submodule in submodules
            for slot, parameter in submodule.parameters.items()
        ]
        attachment = Attachment(engine.module, list(submodules), self._emit_local, gradients)
        self._undo.callback(attachment.close)
        handle = engine.optimizer.optimizer.register_step_post_hook(lambda *_: self._emit_update(engine))
        self._undo.callback(handle.remove)
        place = engine.hooks.index(after) + 1 if after in engine.hooks else len(engine.hooks)
        engine.hooks.insert(place, self)
        self._undo.callback(engine.hooks.remove, self)

    def close(self) -> None:
        """Remove every hook; idempotent."""
        self._undo.close()

    # --- which micro-batch --------------------------------------------------------------------------------------

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Assign results to this forward pass from now on."""
        self._step, self._micro_batch, self._pass = engine.step_number, micro_batch, FORWARD

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Results belong to no pass."""
        self._pass = None

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Assign results to this backward pass from now on; a forward in it is a recomputation."""
        self._step, self._micro_batch, self._pass = engine.step_number, micro_batch, BACKWARD

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Results belong to no pass."""
        self._pass = None

    # --- results ------------------------------------------------------------------------------------------------

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Emit this rank's accumulated gradients; a listener's return value has no effect here."""
        for fqn, slot, parameter in self._parameters:
            gradient = accumulated_gradient(engine.optimizer, parameter).detach()
            self._emit(Address(self._step, None, ACCUMULATED_GRAD, fqn, slot), gradient)

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Emit this rank's shard of the reduced gradients."""
        for fragment in owned_fragments(engine.optimizer):
            if fragment.gradient is not None and (name := self._names.get(id(fragment.parameter))):
                self._emit_in_place(REDUCED_GRAD, *name, fragment.gradient)

    def _emit_update(self, engine: TrainingEngine) -> None:
        """Emit the parameters that the inner optimizer has just updated, before they are gathered."""
        stepped = {id(flat) for group in engine.optimizer.optimizer.param_groups for flat in group["params"]}
        for fragment in owned_fragments(engine.optimizer):
            name = self._names.get(id(fragment.parameter))
            if name is None or id(fragment.flat) not in stepped:
                continue
            fqn, parameter = name
            self._emit_in_place(UPDATE, fqn, f"{parameter}.master", fragment.master)
            for state, value in fragment.states(engine.optimizer).items():
                self._emit_in_place(UPDATE, fqn, f"{parameter}.{state}", value)

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Emit the gathered parameters."""
        for fqn, slot, parameter in self._parameters:
            self._emit_in_place(PARAMETER, fqn, slot, parameter.data)

    def _emit_local(self, phase: str, fqn: str, slot: str, result: Tensor) -> Tensor | None:
        if self._pass is None:
            return None
        if phase == FORWARD and self._pass == BACKWARD:
            phase = RECOMPUTE
        return self._emit(Address(self._step, self._micro_batch, phase, fqn, slot), result)

    def _emit_in_place(self, phase: str, fqn: str, slot: str, value: Tensor) -> None:
        answer = self._emit(Address(self._step, None, phase, fqn, slot), value)
        if answer is not None:
            value.copy_(answer)

    def _emit(self, address: Address, result: Tensor) -> Tensor | None:
        changed = None
        with self._clock:
            for listener in self._of_replays if self._engine.is_replaying else self._listeners:
                answer = listener(address, result if changed is None else changed)
                if answer is not None:
                    changed = answer
        return changed


@dataclass(frozen=True)
class Watch:
    """A listener and the results that it needs.

    Args:
        wanted: returns the names of the submodules that it needs in a step, empty: none. The same on all ranks of a
            tensor group.
        gradients: whether it needs more than forward results of micro-batches.
        injects_faults: whether it changes results (fault injection); it does so in replays too.
        replays: whether it gets results of a stage's replays, and no others.
    """

    listener: Listener
    wanted: Callable[[int], Collection[str]]
    gradients: bool = True
    injects_faults: bool = False
    replays: bool = False


class ObserverSwitch(Hook):
    """Attaches an observer in the steps in which a watch needs results, and removes its hooks in the others.

    The observer is called at this hook's place in the engine's order.

    Args:
        watches: called in this order for every result: fault injection before recording.
        clock: measures the time of attaching and of all listeners; None: it is not measured.

    Raises:
        ConfigError: the submodules' results cannot be observed.
    """

    def __init__(
        self, engine: TrainingEngine, watches: Sequence[Watch], clock: AbstractContextManager[None] | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock or nullcontext()
        self._watches = tuple(watches)
        self._submodules = list_submodules(engine.module)
        self._observer: Observer | None = None
        self._attached: tuple[frozenset[str], tuple[Watch, ...]] = (frozenset(), ())

    def before_step(self, run: Run) -> None:
        """Attach an observer for the results that this step's watches need."""
        step = run.engine.step_number
        wanted = {watch: frozenset(watch.wanted(step)) for watch in self._watches}
        wanting = tuple(watch for watch in self._watches if wanted[watch])
        with self._clock:
            self._attach(frozenset().union(*wanted.values()), wanting)

    @contextmanager
    def everything(self, listener: Listener) -> Iterator[None]:
        """Context in which one listener gets all results, instead of the step's listeners; fault injection stays.

        Args:
            listener: the listener, which changes no result.

        Collective: none; but all ranks of a tensor group must do so together.
        """
        before = self._attached
        injecting = [watch for watch in before[1] if watch.injects_faults]
        self._attach(frozenset(one.fqn for one in self._submodules), (*injecting, Watch(listener, lambda _: ())))
        try:
            yield
        finally:
            self._attach(*before)

    def _attach(self, fqns: frozenset[str], wanting: tuple[Watch, ...]) -> None:
        if (fqns, wanting) == self._attached:
            return
        self.close()
        chosen = [one for one in self._submodules if one.fqn in fqns]
        if chosen:
            gradients = any(watch.gradients for watch in wanting)
            listeners = [watch.listener for watch in wanting if not watch.replays]
            again = [watch.listener for watch in wanting if watch.replays or watch.injects_faults]
            self._observer = Observer(
                self._engine, chosen, listeners, gradients, after=self, clock=self._clock, of_replays=again
            )
        self._attached = (fqns, wanting)

    def close(self) -> None:
        """Remove every hook."""
        if self._observer is not None:
            self._observer.close()
        self._observer = None
        self._attached = (frozenset(), ())
