"""Sums of rows of a matrix product in the steps of an attached training that look, another product each time.

Products are the outputs of the model's ``torch.nn.Linear``, and their gradients of input and weight. The layer is
called through a wrapper in the chosen micro-batch alone; no bit of what it computes changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.attached.budget import GuardBudget
from megasdc.attached.training import Protection, Training
from megasdc.common.addresses import BACKWARD, FORWARD, WEIGHT_GRAD, Address
from megasdc.common.errors import ConfigError
from megasdc.model.submodules import tap_gradient
from megasdc.parallel.collectives import ANY, Compared, compare_replicas, gather_objects
from megasdc.sdc.finding import Finding
from megasdc.sdc.referee.foreign import make_plain
from megasdc.sdc.referee.recompute import Call, Exhibit
from megasdc.sdc.rows import PRODUCTS, Rows, WrongRow, check_rows, rule_on_rows

ROWS = "rows"
"""Name of the flag of a rank with a wrong product."""


@dataclass(frozen=True)
class Product:
    """A product of a linear layer; ``phase``: that of its result."""

    fqn: str
    module: nn.Linear
    phase: str


def products_of(model: nn.Module) -> list[Product]:
    """The products of a model's linear layers that are called as such, in the order of its definition."""
    linear = [
        (fqn, one)
        for fqn, one in model.named_modules()
        if fqn and type(one).forward is nn.Linear.forward and isinstance(one, nn.Linear) and "weight" in one._parameters
    ]
    return [
        Product(fqn, one, phase)
        for fqn, one in linear
        for phase in PRODUCTS
        if phase != WEIGHT_GRAD or one.weight.requires_grad
    ]


@dataclass
class _WrongProduct:
    """The wrong product of a step, with what it was made of, copied: input, gradient of the output or None."""

    wrong: WrongRow
    inputs: Tensor
    gradient: Tensor | None
    autocast: torch.dtype | None


def _exhibit_of(address: Address, call: Call, result: Tensor) -> Exhibit | None:
    """A product in the type of its operation: mixed precision widens gradients; None: what made it was not seen."""
    exhibit = make_plain(address, [call], result, True)
    if exhibit is None or not exhibit.is_product or call.output is None:
        return None
    return replace(exhibit, result=exhibit.result.to(call.output.dtype))


class GuardRows(Protection):
    """Part of a guard that sums the rows of one product of one micro-batch in each step that looks.

    Attributes:
        products: number of products that are looked at in turn, on the rank that has most.

    Raises:
        ConfigError: no rank has a linear layer; on all ranks.

    Collective: all ranks of the world.
    """

    what = "check"
    trained_on = True
    name = "sums of rows"

    def __init__(self, training: Training, budget: GuardBudget) -> None:
        self._training, self._budget, self._model = training, budget.checks, training.engine.module
        self._micro_batches = int(training.engine.gradient_accumulation_steps())
        self._products = products_of(self._model)
        self.products = max(gather_objects(len(self._products), training.host_group))
        if not self.products:
            raise ConfigError(
                "sdc.always_on.rows: got true, and the model has no torch.nn.Linear, whose products are summed; set it "
                "to false."
            )
        self._step, self._count = training.step, 0
        self._due: Product | None = None
        self._micro_batch = 0
        self._wrong: _WrongProduct | None = None
        self._handles = [
            self._model.register_forward_pre_hook(self._before_forward),
            self._model.register_forward_hook(self._after_forward, always_call=True),
        ]
        budget.add(self._begin)

    def close(self) -> None:
        """Remove the hooks."""
        self._unwrap()
        for handle in self._handles:
            handle.remove()

    def _begin(self, step: int) -> None:
        self._step, self._count, self._due, self._wrong = step, 0, None, None
        if self._products and self._budget.looked_at(step):
            turn = self._budget.cadence.turn(step)
            self._micro_batch = turn % self._micro_batches
            self._due = self._products[turn // self._micro_batches % len(self._products)]

    # --- the chosen layer, in the chosen micro-batch alone -----------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if not (self._model.training and torch.is_grad_enabled()):
            return
        if self._due is not None and self._count == self._micro_batch:
            self._due.module.forward = self._wrapped(self._due, self._due.module.forward)  # type: ignore[method-assign]
        self._count += 1

    def _after_forward(self, *_: Any) -> None:
        self._unwrap()

    def _unwrap(self) -> None:
        if self._due is not None and isinstance(own := vars(self._due.module).get("forward"), _Wrapped):
            own.undo()

    def _wrapped(self, due: Product, compute: Any) -> _Wrapped:
        return _Wrapped(due.module, compute, lambda inputs: self._called(due, compute, inputs))

    def _called(self, due: Product, compute: Any, inputs: Tensor) -> Tensor:
        """Compute the layer, and have its due product checked once it is known."""
        address = Address(self._step, self._micro_batch, due.phase, due.fqn, PRODUCTS[due.phase])
        call, kept = Call(due.module, (inputs.detach(),)), list[Call]()
        versions = [inputs, due.module.weight]
        before, kind = [one._version for one in versions], inputs.device.type
        mixed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

        def check(result: Tensor) -> None:
            if before == [one._version for one in versions]:
                self._check(address, kept[0], result, mixed)
            else:
                self._not_checked(address, "it was changed in place before its result was known")

        if due.phase == BACKWARD and inputs.requires_grad:
            inputs = tap_gradient(inputs, check)
        with self._tapped(due.module, check if due.phase == WEIGHT_GRAD else None):
            output: Tensor = compute(inputs)
        kept.append(replace(call, output=output.detach()))
        if due.phase == FORWARD:
            check(output.detach())
        elif output.requires_grad:
            output.register_hook(lambda gradient: call.gradients.append(gradient.detach()))
        else:
            self._not_checked(address, "no gradient flows through it")
        return output

    @staticmethod
    @contextmanager
    def _tapped(module: nn.Linear, check: Any) -> Any:
        """Context in which the gradient of the weight from this call is checked; others may use the weight, too."""
        own = module._parameters
        if check is not None:
            vars(module)["_parameters"] = {**own, "weight": tap_gradient(module.weight, check)}
        try:
            yield
        finally:
            vars(module)["_parameters"] = own

    def _check(self, address: Address, call: Call, result: Tensor, mixed: torch.dtype | None) -> None:
        with self._budget.looks:
            exhibit = _exhibit_of(address, call, result)
            if exhibit is None:
                self._not_checked(address, "what it was made of was not seen")
                return
            wrong = check_rows(address, exhibit, self._training.events)
            if wrong is not None and self._wrong is None:
                gradient = call.gradients[0].clone() if call.gradients else None
                self._wrong = _WrongProduct(wrong, call.args[0].clone(), gradient, mixed)

    def _not_checked(self, address: Address, reason: str) -> None:
        self._training.events.emit("sdc", "row_not_checked", step=address.step, address=str(address), reason=reason)

    # --- before the optimizer steps ----------------------------------------------------------------------------------

    def before_step(self, step: int) -> Iterable[Finding]:
        """Agree on whether a product was wrong, in steps that look.

        Collective: all ranks of the world, likewise.
        """
        self._unwrap()
        if not self._budget.looked_at(step):
            return
        training, wrong = self._training, None if self._wrong is None else self._wrong.wrong
        with self._budget.fixed:
            flag = Compared(wrong is not None, ANY)
            agreed = compare_replicas({ROWS: flag}, training.dims, training.host_group)
        if agreed[ROWS]:
            self._budget.ignore_step()
            rows, repeats = Rows(wrong, self._micro_batch, self._again), training.settings.sdc.repeats
            found = rule_on_rows(training, step, rows, repeats, training.suspects.ranks)
            why = "the step's micro-batches are the loop's, and are not computed again for use"
            yield replace(found, unrepaired=why)

    def _again(self) -> WrongRow | None:
        """Compute the layer once more from the same operands; returns the wrong product of that time, or None."""
        first, due = self._wrong, self._due
        if first is None or due is None:
            return None
        module, inputs = due.module, first.inputs.clone().requires_grad_(first.inputs.is_floating_point())
        kind = self._training.engine.device.type
        with torch.enable_grad(), torch.autocast(kind, first.autocast, enabled=first.autocast is not None):
            output = module(inputs)
        call = Call(module, (inputs.detach(),), output.detach())
        result = output.detach()
        if due.phase != FORWARD:
            assert first.gradient is not None, "the first result was made of it"
            call.gradients.append(first.gradient)
            wanted: Tensor = inputs if due.phase == BACKWARD else module.weight
            (result,) = torch.autograd.grad(output, wanted, first.gradient)
        exhibit = _exhibit_of(first.wrong.address, call, result)
        return None if exhibit is None else check_rows(first.wrong.address, exhibit, self._training.events)


class _Wrapped:
    """A module's ``forward`` with a wrapper around it, until ``undo``."""

    def __init__(self, module: nn.Module, compute: Any, call: Any) -> None:
        self._module, self._call = module, call
        self._was = vars(module).get("forward")

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Compute the module."""
        (inputs,) = (*args, *options.values())
        return self._call(inputs)

    def undo(self) -> None:
        """Give the module its own ``forward`` back."""
        if self._was is None:
            del self._module.forward
        else:
            self._module.forward = self._was
