"""The referee in a run: ranks repeat a disputed product, compute its differing elements in fp64, and compare.

Every function that says so is called by all ranks at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.model.kinds import FC1, FC2, HEAD, PROJECTION, QKV
from megasdc.model.submodules import Submodule
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.fp64.referee import Exact, agreed, judge, product

LINEAR = frozenset({QKV, PROJECTION, FC1, FC2, HEAD})
"""Kinds of submodules whose results the referee computes."""
RESULTS = {(FORWARD, "output"), (RECOMPUTE, "output"), (BACKWARD, "input"), (WEIGHT_GRAD, "weight")}
"""Phases and tensors of theirs: the product with the weight, and the products of both gradients."""
ROWS, ELEMENTS = 16, 1024
"""Most rows that are sent, and most elements of them that are computed."""


@dataclass(frozen=True)
class Opinion:
    """What the referee found at one result; the same on all ranks.

    Args:
        address: of the result.
        within: by rank, whether it is what rounding allows; empty: undecided.
        reason: why nothing was decided; empty: something was.
        elements: that were computed.
        worst: of the element farthest outside: its place [row, column], the exact value, its bound, and the value of
            each rank; None: none is outside.
    """

    address: Address
    within: Mapping[int, bool]
    reason: str = ""
    elements: int = 0
    worst: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Operands:
    """Of one call of a linear layer."""

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    gradients: list[Tensor]


class Referee:
    """Captures what a submodule multiplies, and the result, while a micro-batch is repeated.

    Args:
        submodules: of this rank's stage.
        group: of all ranks, on the host.
    """

    def __init__(self, submodules: Sequence[Submodule], rank: int, group: dist.ProcessGroup | None) -> None:
        self._modules = {one.fqn: one.module for one in submodules if one.kind in LINEAR}
        self._rank, self._group = rank, group
        self._wanted: Address | None = None
        self._result: Tensor | None = None

    def listen(self, address: Address, result: Tensor) -> None:
        """A listener, after fault injection: keeps the result that is asked for."""
        if address == self._wanted:
            self._result = result.detach().clone()

    def ask(
        self, address: Address, values: Mapping[int, int], repeat: Callable[[], Mapping[int, int | None]]
    ) -> Opinion:
        """Judge results of equal inputs that differ between ranks.

        Args:
            values: checksums by rank.
            repeat: computes the micro-batch once more, and returns what each of these ranks got this time, None where
                that proves nothing.

        Collective: all ranks of the world.
        """
        if (address.phase, address.slot) not in RESULTS:
            return Opinion(address, {}, f"the referee does not compute {address.phase} of {address.slot}")
        self._wanted = address if self._rank in values else None
        with self._captured(address) as calls:
            again = repeat()
        result, self._wanted, self._result = self._result, None, None
        mine = None
        if self._rank in values and result is not None and calls and again.get(self._rank) == values[self._rank]:
            mine = _Exhibit.of(address, calls, result)
        return self._compare(address, values, mine)

    def _compare(self, address: Address, values: Mapping[int, int], mine: _Exhibit | None) -> Opinion:
        shown = gather_objects(None if mine is None else (mine.operands, mine.rows), self._group)
        known = {rank: one for rank in values if (one := shown[rank]) is not None}
        rows = _differing_rows([digests for _, digests in known.values()])
        reason = ""
        if absent := sorted(values.keys() - known.keys()):
            reason = f"ranks {absent} did not repeat their results, or it is no linear layer"
        elif len({operands for operands, _ in known.values()}) > 1:
            reason = "what was multiplied differs already"
        elif not rows:
            reason = "the results are equal when they are repeated"
        if reason:
            return Opinion(address, {}, reason)
        sent = gather_objects(None if mine is None else mine.values(rows), self._group)
        results = {rank: part for rank in values if (part := sent[rank]) is not None}
        places = _differing(list(results.values()))[:ELEMENTS]
        exact = gather_objects(None if mine is None else mine.exact(rows, places), self._group)
        reference = agreed([found for rank in values if (found := exact[rank]) is not None])
        if reference is None:
            return Opinion(address, {}, "ranks computed the elements differently in fp64 too", len(places))
        taken = {rank: one[places[:, 0], places[:, 1]] for rank, one in results.items()}
        within = judge(taken, reference)
        if not within:
            return Opinion(address, {}, "rounding explains all results, or none", len(places))
        return Opinion(address, within, "", len(places), _worst(rows, places, taken, within, reference))

    @contextmanager
    def _captured(self, address: Address) -> Iterator[list[_Operands]]:
        """Inside, calls of the submodule are kept, in their order, where this rank is asked and has it."""
        calls: list[_Operands] = []
        module: Any = self._modules.get(address.fqn) if self._wanted is not None else None
        if module is None:
            yield calls
            return
        local, was = module._forward_impl, vars(module).get("_forward_impl")

        def kept(*args: Any, **options: Any) -> Tensor:
            output: Tensor = local(*args, **options)
            call = _Operands(options["input"].detach().clone(), options["weight"].detach(), options["bias"], [])
            calls.append(call)
            if output.requires_grad:
                output.register_hook(lambda gradient: call.gradients.append(gradient.detach().clone()))
            return output

        module._forward_impl = kept
        try:
            yield calls
        finally:
            if was is None:
                del module._forward_impl
            else:
                module._forward_impl = was


@dataclass(frozen=True)
class _Exhibit:
    """A result, and its factors: element [r, c] is the product of row r of one and row c of the other."""

    left: Tensor
    right: Tensor
    bias: Tensor | None
    result: Tensor

    @classmethod
    def of(cls, address: Address, calls: Sequence[_Operands], result: Tensor) -> _Exhibit | None:
        """None: its factors were not seen."""
        if address.phase in (FORWARD, RECOMPUTE):
            call = calls[0 if address.phase == FORWARD else -1]
            return cls(_rows(call.inputs), call.weight, call.bias, _rows(result))
        call = next((one for one in reversed(calls) if one.gradients), calls[-1])
        if not call.gradients:
            return None
        gradient = _rows(call.gradients[-1])
        if address.phase == BACKWARD:
            return cls(gradient, call.weight.T, None, _rows(result))
        return cls(gradient.T, _rows(call.inputs).T, None, _rows(result))

    @property
    def operands(self) -> tuple[int, ...]:
        """Checksums of the factors."""
        return tuple(_digest(one) for one in (self.left, self.right, self.bias) if one is not None)

    @property
    def rows(self) -> list[int]:
        """Checksums of the rows of the result."""
        return [_digest(row) for row in self.result.cpu()]

    def values(self, rows: Sequence[int]) -> Tensor:
        """Some rows of the result; [len(rows), columns], fp64."""
        return self.result[list(rows)].cpu().double()

    def exact(self, rows: Sequence[int], places: Tensor) -> Exact:
        """Elements of those rows, [n, 2], computed on the host."""
        own, columns = torch.tensor(rows)[places[:, 0]], places[:, 1]
        left, right = self.left[own.to(self.left.device)].cpu(), self.right[columns.to(self.right.device)].cpu()
        bias = None if self.bias is None else self.bias.detach().cpu()[columns]
        return product(left, right, self.result.dtype, bias)


def _differing_rows(digests: Sequence[Sequence[int]]) -> list[int]:
    """The first rows at which checksums differ between ranks."""
    return [row for row, found in enumerate(zip(*digests, strict=True)) if len(set(found)) > 1][:ROWS]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _digest(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(content.data)


def _differing(results: Sequence[Tensor]) -> Tensor:
    """Places, [n, 2], at which results differ; NaN is equal to NaN."""
    different = torch.zeros_like(results[0], dtype=torch.bool)
    for one in results[1:]:
        different |= (one != results[0]) & ~(one.isnan() & results[0].isnan())
    return different.nonzero()


def _worst(
    rows: Sequence[int], places: Tensor, results: Mapping[int, Tensor], within: Mapping[int, bool], exact: Exact
) -> Mapping[str, Any]:
    wrong = next(rank for rank, right in within.items() if not right)
    distance = ((results[wrong] - exact.values).abs() / exact.bounds).nan_to_num(nan=torch.inf)
    place = int(distance.argmax())
    row, column = places[place].tolist()
    return {
        "element": [rows[row], column],
        "exact": exact.values[place].item(),
        "bound": exact.bounds[place].item(),
        "values": {rank: one[place].item() for rank, one in results.items()},
    }
