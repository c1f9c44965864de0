"""Matrix products of a device: compared with each other, and with expected checksums.

The expected checksum of a product is that of a golden file, where there is one for this device, else the device's own
first: that of most passes of a round. A product without an expected checksum is also compared with an fp64 product,
within its rounding error bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.engine.observer import Listener
from megasdc.ops.stress.collectives import SHOWN, describe
from megasdc.ops.stress.gemms import DTYPES, SLOTS, Linear, case_name, deviation, factors, linears, make_inputs
from megasdc.tensors.bits import as_bits
from megasdc.tensors.checksum import algorithm, default_algorithm, read_back

PASSES = 3
"""Number of times that each product is computed in a round: two outvote a wrong one. A fault's steps count passes over
all rounds."""

Harm = Callable[[int], Listener | None]
"""The injector for layers of a model of this width; None: none."""


@dataclass
class Products:
    """The products of one device, and their expected checksums by case.

    ``against`` is the source of these: ``golden``, or ``first``, the device's own earlier results.
    """

    device: torch.device
    harm: Harm = lambda hidden: None
    expected: dict[str, int] = field(default_factory=dict)
    against: str = "first"

    @property
    def algorithm(self) -> str:
        """Name of the checksum algorithm."""
        return default_algorithm(self.device).name

    def expect(self, checksums: dict[str, int], against: str) -> None:
        """Sets the expected checksums; see the class."""
        self.expected, self.against = dict(checksums), against

    def run_round(self, number: int) -> dict[str, Any]:
        """Computes every product ``PASSES`` times in a round (first is 1) and compares.

        Returns ``compared`` and ``wrong``: numbers of products; ``findings``: the first wrong ones; ``checked``: how
        many were compared with fp64; ``values``: the checksum of most passes, by case.
        """
        said: dict[str, Any] = {"compared": 0, "wrong": 0, "checked": 0, "findings": [], "values": {}}
        for linear in linears(self.device.type == "cuda"):
            inputs = make_inputs(linear)
            for dtype in DTYPES:
                there = {name: tensor.to(self.device, DTYPES[dtype]) for name, tensor in inputs.items()}
                for phase in SLOTS:
                    self._run_case(said, number, linear, dtype, phase, there)
        return said

    def _run_case(
        self, said: dict[str, Any], number: int, linear: Linear, dtype: str, phase: str, inputs: dict[str, Tensor]
    ) -> None:
        case = case_name(linear, dtype, phase)
        results = [self._compute(linear, phase, inputs, self._step(number, turn)) for turn in range(PASSES)]
        values = read_back([algorithm(self.algorithm).start(result) for result in results])
        most, _ = Counter(values).most_common(1)[0]
        said["values"][case] = most
        said["compared"] += PASSES
        if case not in self.expected:
            self.expected[case] = most
            said["checked"] += 1
            self._check(said, case, results[values.index(most)], *factors(inputs, phase))
        for turn, value in enumerate(values):
            if value != self.expected[case]:
                finding: dict[str, Any] = {"what": case}
                if len(said["findings"]) < SHOWN:
                    finding = self._describe(case, results, turn)
                self._add(said, {**finding, "against": self.against, "step": self._step(number, turn)})

    @staticmethod
    def _step(number: int, turn: int) -> int:
        return (number - 1) * PASSES + turn + 1

    def _compute(self, linear: Linear, phase: str, inputs: dict[str, Tensor], step: int) -> Tensor:
        left, right = factors(inputs, phase)
        result = left @ right
        harm = self.harm(linear.hidden)
        answer = None if harm is None else harm(Address(step, 0, phase, linear.fqn, SLOTS[phase]), result)
        return result if answer is None else answer

    def _check(self, said: dict[str, Any], case: str, result: Tensor, left: Tensor, right: Tensor) -> None:
        far = deviation(result, left, right)
        wrong = int((far > 1).sum())
        if wrong:
            largest = float(far.max())
            finding = {"what": case, "elements": wrong, "of": far.numel(), "first": int(far.flatten().argmax())}
            times = None if largest == torch.inf or largest > 1e300 else largest
            self._add(said, {**finding, "against": "reference", "times_bound": times})

    @staticmethod
    def _describe(case: str, results: list[Tensor], turn: int) -> dict[str, Any]:
        """Elements and bits in which a wrong product differs from the bitwise majority of all passes."""
        # With an intermittent fault the majority is the correct product; a persistent fault shows in no element.
        a, b, c = map(as_bits, results)
        most = ((a & b) | (a & c) | (b & c)).view(results[turn].dtype)
        found = describe(case, most.cpu(), results[turn].cpu())
        return found if found["elements"] else {"what": case}

    @staticmethod
    def _add(said: dict[str, Any], finding: dict[str, Any]) -> None:
        said["wrong"] += 1
        if len(said["findings"]) < SHOWN:
            said["findings"].append(finding)


def device_of_slot(slot: int) -> torch.device:
    """The device that the process with this number tests; makes a GPU the current device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(slot)
    return torch.device("cuda", slot)
