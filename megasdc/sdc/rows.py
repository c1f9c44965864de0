"""Sums of the rows of a matrix product, which prove it right or wrong without computing it again.

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

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD, WEIGHT_GRAD, Address
from megasdc.events import EventLog
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.finding import Finding
from megasdc.sdc.host import Host
from megasdc.sdc.incident import Opinion, Outside
from megasdc.sdc.referee.recompute import Exhibit
from megasdc.sdc.referee.referee import is_within
from megasdc.sdc.referee.rounding import WORKING, product
from megasdc.sdc.trace import count_by_submodule, merge_counts
from megasdc.sdc.verdict import REFEREE, Unrepeated, judge_recomputed
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


RIGHT = 0
"""Placeholder for the checksum of a right product, which nobody computes, and of a file that cannot be read."""
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


def check_rows(address: Address, exhibit: Exhibit, events: EventLog) -> WrongRow | None:
    """The wrong element of a product; None: there is none, or only a row that rounding explains, which is an event.

    Sync: waits for the device.
    """
    left, right, *rest = exhibit.factors
    bias = rest[0] if rest else None
    found = suspicion(left, right, bias, exhibit.result)
    suspicious = (~(found <= 1)).nonzero().flatten()[:ROWS].tolist()  # NaN too
    for row in suspicious:
        outside = worst_element(left, right, bias, exhibit.result, row)
        if outside is not None and not _is_explained(exhibit, outside):
            return WrongRow(address, _checksum(exhibit.result), outside)
    if suspicious:
        ratio = found[suspicious[0]].item()
        events.emit(
            "sdc", "row_within_rounding", step=address.step, address=str(address), row=suspicious[0], ratio=ratio
        )
    return None


def _is_explained(exhibit: Exhibit, outside: Outside) -> bool:
    """Whether an element is within the exhibit's own bound, such as of a bias that is one more term of the sum."""
    row, column = (torch.tensor([place]) for place in outside.element)
    got = exhibit.result[outside.element].detach().cpu().double().reshape(1)
    return bool(is_within(got, exhibit.compute(row, column)).all())


def rule_on_rows(host: Host, step: int, rows: Rows, repeats: int, earlier: Collection[int]) -> Finding:
    """Rule on products with an element that rounding does not explain, by repeats of them.

    Args:
        earlier: ranks that were wrong in an earlier event of the run.

    Collective: all ranks of the world.
    """
    found = gather_objects(rows.wrong, host.host_group)
    flagged = {rank: one for rank, one in enumerate(found) if one is not None}
    for rank, one in flagged.items():
        host.events.emit_on_rank_0("sdc", "finding", step=step, tier="rows", rank=rank, address=str(one.address))
    again = [gather_objects(rows.again(), host.host_group) for _ in range(repeats)]
    rulings, opinions, counts = [], [], []
    for rank, one in flagged.items():
        first = Unrepeated(one.address, one.checksum, RIGHT)
        pairs = [(RIGHT if (now := found[rank]) is None else now.checksum, RIGHT) for found in again]
        ruling = judge_recomputed(rank, first, pairs, rank in earlier)
        rulings.append(replace(ruling, basis=REFEREE, expected=None))
        opinions.append(Opinion(one.address, {rank: False}, "", 1, _named(one, rank)))
        counts.append(count_by_submodule(one.address.phase, [one.address.fqn], rank))
    shown = tuple(rulings), host.dims.world_size, merge_counts(counts), tuple(opinions)
    return Finding("rows", rows.micro_batch, *shown)


def _named(wrong: WrongRow, rank: int) -> Outside:
    """The wrong element of a product, with its value on ``rank``."""
    return replace(wrong.outside, values={rank: wrong.outside.values[0]})


def _checksum(result: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(as_bits(result.detach()).contiguous().cpu().numpy().data)
