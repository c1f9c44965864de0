"""Checks of one product of a linear layer in each step that looks: its rows are summed, others the next time.

The sum of each row is compared with what the factors say, without computing the product again. Of ``Y = A B^T`` the sum
of row r is ``a_r . s`` with ``s`` the sum of B's rows (Huang and Abraham 1984, Algorithm-Based Fault Tolerance for
Matrix Operations). That takes two products of a matrix and a vector instead of one of two matrices.

The roundings of a row's elements are taken as independent: that of an element has at most about the standard deviation
``u |a_r| |b_c|``, with u the unit roundoff of the sums, since each of K roundings is of a partial sum of about ``|a_r|
|b_c| / sqrt(K)``; to this comes ``u' |y_rc|`` for the type of the result. A row is suspicious where its sum is off by
more than ``LIMIT`` standard deviations. This is no proof, and names nobody: elements of the row outside of their proven
bound do (``megasdc.sdc.referee.rounding.product``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD, WEIGHT_GRAD, Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.model.submodules import Submodule
from megasdc.sdc.incident import Outside
from megasdc.sdc.referee.recompute import LINEAR, Call, Exhibit, kept_calls, make_exhibit
from megasdc.sdc.referee.referee import is_within
from megasdc.sdc.referee.rounding import WORKING, product
from megasdc.tensors.bits import as_bits

LIMIT = 8.0
"""Number of standard deviations that a sum may be off."""
BLOCK = 64
"""Number of terms that are added up in fp32 before they are added in fp64: fast, and exact enough."""
ELEMENTS = 1 << 22
"""Number of products of two numbers that are computed in fp64 at a time."""


def suspicion(left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor) -> Tensor:
    """Error of the sum of each row of ``left right^T + bias``, divided by the largest that rounding makes likely.

    Args:
        left: first factor, [R, K], as the device had it.
        right: second factor, [C, K].
        bias: bias, [C]; None: nothing is added.
        result: result of the device, [R, C].

    Returns:
        The quotient of each row, [R], fp64; above 1: suspicious; NaN where the result or a factor is not finite.
    """
    columns, terms = right.shape
    expected = left.double() @ _sum_of_rows(right)
    if bias is not None:
        expected = expected + bias.double().sum()
    off = (_sum_of_rows(result.T) - expected).abs()
    roundoff, own = torch.finfo(WORKING).eps / 2, torch.finfo(result.dtype).eps / 2
    of_sums = roundoff**2 * (1 + BLOCK / terms) * _squares(left, -1) * _squares(right, None)
    of_results = (BLOCK * roundoff**2 + own**2) * _squares(result, -1)
    least = columns * terms * torch.finfo(WORKING).tiny
    return off / (LIMIT * (of_sums + of_results).sqrt() + least)


def worst_element(left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor, row: int) -> Outside | None:
    """The element of a row of ``result`` farthest outside of what rounding allows; None: none is outside.

    Args:
        left, right, bias, result: as for ``suspicion``.
    """
    factor, worst, farthest = left[row].cpu(), None, 0.0
    step = max(1, ELEMENTS // factor.numel())
    for start in range(0, result.shape[1], step):
        part = slice(start, start + step)
        others = right[part].cpu()
        got = result[row, part].cpu()
        exact = product(factor.expand(len(others), -1), others, got.dtype, None if bias is None else bias[part].cpu())
        outside = ~is_within(got.double(), exact)
        distance = ((got.double() - exact.values).abs() / exact.bounds).nan_to_num(nan=torch.inf)
        distance = torch.where(outside, distance, 0.0)
        place = int(distance.argmax())
        if distance[place] > farthest:
            farthest = distance[place].item()
            values = exact.values[place].item(), exact.bounds[place].item()
            worst = Outside((row, start + place), *values, {0: repr(got[place].item())})
    return worst


def _sum_of_rows(matrix: Tensor) -> Tensor:
    """The sum over the first dimension, [n, m] to [m], fp64."""
    whole = len(matrix) // BLOCK * BLOCK
    blocks = matrix[:whole].unflatten(0, (-1, BLOCK)).sum(1, dtype=WORKING)
    return blocks.double().sum(0) + matrix[whole:].double().sum(0)


def _squares(matrix: Tensor, dim: int | None) -> Tensor:
    """Squared norm of each row, or of all."""
    if dim is not None and matrix.stride(-1) != 1:  # a transposed one: its columns are added up within the cache
        return torch.stack([part.to(WORKING).square().sum(0) for part in matrix.T.split(BLOCK)]).sum(0).double()
    return torch.linalg.vector_norm(matrix, dim=dim, dtype=WORKING).double().square()


PRODUCTS = {FORWARD: "output", BACKWARD: "input", WEIGHT_GRAD: "weight"}
"""Results that are products, by phase."""
ROWS = 16
"""Largest number of suspicious rows of a result whose elements are computed."""


@dataclass(frozen=True)
class WrongRow:
    """A product with an element that rounding does not explain.

    Args:
        checksum: XXH3-64 of the whole result.
        outside: the element farthest outside of its bound.
    """

    address: Address
    checksum: int
    outside: Outside


@dataclass(frozen=True)
class Rows:
    """Result of a rank's check of rows, and the function by which all ranks repeat it.

    Args:
        wrong: the wrong product; None: none was found.
        micro_batch: number of the checked micro-batch; the same on all ranks.
        again: computes the micro-batch once more; returns the wrong product of that time, or None.
    """

    wrong: WrongRow | None
    micro_batch: int
    again: Callable[[], WrongRow | None]


@dataclass(frozen=True)
class _Kept:
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
        self._kept: _Kept | None = None
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
        self._keep(micro_batch)

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Stop keeping calls."""
        self._stop()

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Keep the layer's calls in this pass, where activations are computed again."""
        self._keep(micro_batch)

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Stop keeping calls."""
        self._stop()

    def _keep(self, micro_batch: int) -> None:
        if self._due is not None and micro_batch == self.micro_batch:
            self._keeping = kept_calls(self._due[0].module, self._calls)
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
            self._kept = _Kept(address, exhibit, _versions(exhibit))
            if not self._may_wait or phase == WEIGHT_GRAD:  # weights' gradients accumulate in place
                self._look_at_kept()

    def while_waiting(self, engine: TrainingEngine) -> None:
        """Sum the rows of the kept products."""
        self._look_at_kept()

    def _look_at_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            return
        if _versions(kept.exhibit) == kept.versions:
            self._wrong = self._look(kept.address, kept.exhibit)
        else:
            self._not_checked(kept.address, "it was changed in place before the stage had time")

    def _not_checked(self, address: Address, reason: str) -> None:
        self._events.emit("sdc", "row_not_checked", step=address.step, address=str(address), reason=reason)

    def _look(self, address: Address, exhibit: Exhibit) -> WrongRow | None:
        left, right, *rest = exhibit.factors
        bias = rest[0] if rest else None
        found = suspicion(left, right, bias, exhibit.result)
        suspicious = (~(found <= 1)).nonzero().flatten()[:ROWS].tolist()  # NaN too
        for row in suspicious:
            outside = worst_element(left, right, bias, exhibit.result, row)
            if outside is not None:
                return WrongRow(address, _checksum(exhibit.result), outside)
        if suspicious:
            ratio = found[suspicious[0]].item()
            self._events.emit(
                "sdc", "row_within_rounding", step=address.step, address=str(address), row=suspicious[0], ratio=ratio
            )
        return None

    def take(self) -> WrongRow | None:
        """The wrong product since the last call; None: none was found."""
        with self._clock:
            self._look_at_kept()
        found, self._wrong = self._wrong, None
        return found


def named(wrong: WrongRow, rank: int) -> Outside:
    """The wrong element of a product, with its value on ``rank``."""
    return replace(wrong.outside, values={rank: wrong.outside.values[0]})


def _versions(exhibit: Exhibit) -> tuple[int, ...]:
    return tuple(one._version for one in (*exhibit.factors, exhibit.result))


def _checksum(result: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(as_bits(result.detach()).contiguous().cpu().numpy().data)
