"""Checks of one product of a linear layer in each step that looks: its rows are summed, others the next time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor

from megasdc.common.addresses import WEIGHT_GRAD, Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.model.submodules import Submodule
from megasdc.sdc.referee.recompute import LINEAR, Call, Exhibit, make_exhibit, record_calls
from megasdc.sdc.rows import PRODUCTS, WrongRow, check_rows


@dataclass(frozen=True)
class _CopiedRows:
    """A product whose rows are to be summed, with the version of each of its tensors, which counts changes in place."""

    address: Address
    exhibit: Exhibit
    versions: tuple[int, ...]


class RowChecks(Hook):
    """Sums the rows of one product of one micro-batch: output, input's gradient or weight's gradient of a linear layer.

    It sits before the hook that observes results, which calls ``listen``. With pipeline stages, and without
    tensor parallelism, the sums are made where the stage waits for others, but for those of weights' gradients; what
    was changed in place until then is not checked: event ``sdc/row_not_checked``.

    Args:
        submodules: submodules of this rank's stage.
        clock: measures the time of the checks.

    Attributes:
        fqns: names of the submodules that are looked at in turn.
        micro_batch: number of the micro-batch that this step looks at; None: none.
    """

    def __init__(self, submodules: Sequence[Submodule], run: Run, clock: AbstractContextManager[None]) -> None:
        self._events, self._clock = run.events, clock
        linear = [one for one in submodules if one.kind in LINEAR]
        self.fqns = frozenset(one.fqn for one in linear)
        self._products = [(one, phase) for one in linear for phase in PRODUCTS]
        self._due: tuple[Submodule, str] | None = None
        self.micro_batch: int | None = None
        self._calls: list[Call] = []
        self._keeping: AbstractContextManager[list[Call]] | None = None
        self._looked = False
        # With tensor parallelism results are summed over ranks in place, which no version counter sees.
        self._may_wait = run.dims.pipeline > 1 and run.dims.tensor == 1
        self._kept: _CopiedRows | None = None
        self._wrong: WrongRow | None = None

    def choose(self, turn: int, of: int, *, looks: bool) -> None:
        """Choose the product and micro-batch that a step looks at.

        Args:
            turn: number of the look.
            of: number of micro-batches of a step.
            looks: whether it looks at all.
        """
        looks = looks and bool(self._products)
        self._wrong = None  # what was wrong in repeats for a verdict on the last step
        self.micro_batch = turn % of if looks else None
        self._due = self._products[turn // of % len(self._products)] if looks else None
        self._calls.clear()
        self._kept = None

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Context in which nothing is checked, since its computations differ from the step's."""
        due, self._due = self._due, None
        try:
            yield
        finally:
            self._due = due

    # --- calls of the layer, in the chosen micro-batch alone -------------------------------------------------------

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Keep the layer's calls in this pass."""
        self._copy_rows(micro_batch)

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Stop keeping calls."""
        self._stop()

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Keep the layer's calls in this pass, where activations are recomputed."""
        self._copy_rows(micro_batch)

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Stop keeping calls."""
        self._stop()

    def _copy_rows(self, micro_batch: int) -> None:
        if self._due is not None and micro_batch == self.micro_batch:
            self._keeping = record_calls(self._due[0].module, self._calls)
            self._keeping.__enter__()

    def _stop(self) -> None:
        if self._keeping is not None:
            self._keeping.__exit__(None, None, None)
            self._keeping = None
        if self._looked:
            self._calls.clear()
            self._looked = False

    # --- results ---------------------------------------------------------------------------------------------------

    def listen(self, address: Address, result: Tensor) -> None:
        """Listener that checks the rows of the chosen result."""
        if self._due is None or address.micro_batch != self.micro_batch:
            return
        submodule, phase = self._due
        if (address.fqn, address.phase, address.slot) != (submodule.fqn, phase, PRODUCTS[phase]):
            return
        with self._clock:
            exhibit = make_exhibit(address, submodule.kind, self._calls, result)
            self._looked = True
            if exhibit is None or not exhibit.is_product:
                self._not_checked(address, "what it was made of was not seen")
                return
            self._kept = _CopiedRows(address, exhibit, _versions(exhibit))
            if not self._may_wait or phase == WEIGHT_GRAD:  # weights' gradients accumulate in place
                self._check_copies()

    def while_waiting(self, engine: TrainingEngine) -> None:
        """Sum the rows of the kept products."""
        self._check_copies()

    def _check_copies(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            return
        if _versions(kept.exhibit) == kept.versions:
            self._wrong = check_rows(kept.address, kept.exhibit, self._events)
        else:
            self._not_checked(kept.address, "it was changed in place before the stage had time")

    def _not_checked(self, address: Address, reason: str) -> None:
        self._events.emit("sdc", "row_not_checked", step=address.step, address=str(address), reason=reason)

    def pop_wrong(self) -> WrongRow | None:
        """The wrong product since the last call; None: none was found."""
        with self._clock:
            self._check_copies()
        found, self._wrong = self._wrong, None
        return found


def _versions(exhibit: Exhibit) -> tuple[int, ...]:
    return tuple(one._version for one in (*exhibit.factors, exhibit.result))
