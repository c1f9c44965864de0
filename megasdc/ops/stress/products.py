"""Matrix products of a device: compared with each other, and with expected checksums.

The expected checksum of a product is that of a golden file, where there is one for this device, else the device's own
first: that of most passes of a round. A product without an expected checksum is also compared with an fp64 product,
within its rounding error bound.

Matrix products of the stress test: shapes, inputs, and the error bound of a correct result.
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
from megasdc.model.randomness import mix
from megasdc.ops.stress.collectives import SHOWN, count_differences
from megasdc.tensors.bits import as_bits
from megasdc.tensors.checksum import algorithm, default_algorithm, read_back

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOTS = {"forward": "output", "backward": "input", "weight_grad": "weight"}
"""Slots of the three products of a linear layer in addresses, by phase."""
FACTORS = {
    "self_attention.linear_qkv": (1, 3),
    "self_attention.linear_proj": (1, 1),
    "mlp.linear_fc1": (1, 4),
    "mlp.linear_fc2": (4, 1),
}
"""Inputs and outputs of a layer's linear submodules, as multiples of the model's width."""
HOST_MODELS = ((64, 256), (32, 768))
DEVICE_MODELS = ((2048, 1024), (2048, 4096))
"""(tokens m, hidden size h) of the layers, on CPUs and on accelerators."""
ODD = ((1, 1000, 1), (7, 13, 5), (129, 257, 63), (3, 4097, 31))
"""(m, k, n) that are no multiple of a tile."""
ACCUMULATED = 2.0**-23
"""Largest relative error of one addition in fp32, also with truncation instead of rounding."""


@dataclass(frozen=True)
class Linear:
    """A linear layer y = x W^T with m tokens, k inputs and n outputs."""

    fqn: str
    m: int
    k: int
    n: int

    def shape(self, phase: str) -> tuple[int, int]:
        """Shape of the result."""
        return {"forward": (self.m, self.n), "backward": (self.m, self.k), "weight_grad": (self.n, self.k)}[phase]

    @property
    def hidden(self) -> int:
        """Width of the model that it represents; for odd shapes, its number of inputs."""
        return int(self.fqn[1 : self.fqn.index(".")]) if self.fqn.startswith("h") else self.k


def linears(on_accelerator: bool) -> list[Linear]:
    """The layers with which a device is tested."""
    models = DEVICE_MODELS if on_accelerator else HOST_MODELS
    layers = [Linear(f"h{h}.{name}", m, a * h, b * h) for m, h in models for name, (a, b) in FACTORS.items()]
    return layers + [Linear(f"odd.{m}x{k}x{n}", m, k, n) for m, k, n in ODD]


def case_name(linear: Linear, dtype: str, phase: str) -> str:
    """Name of one product, with everything that determines its result besides the device."""
    return f"{linear.fqn} {linear.m}x{linear.k}x{linear.n} {dtype} {phase}"


def make_inputs(linear: Linear) -> dict[str, Tensor]:
    """Seeded inputs on the host, fp32: x [m, k], w [n, k] and the output's gradient d [m, n]."""
    generator = torch.Generator().manual_seed(mix(linear.m, linear.k, linear.n))
    shapes = {"x": (linear.m, linear.k), "w": (linear.n, linear.k), "d": (linear.m, linear.n)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def product_factors(inputs: dict[str, Tensor], phase: str) -> tuple[Tensor, Tensor]:
    """The two matrices whose product a phase computes, with the strides that a linear layer passes to the library."""
    x, w, d = inputs["x"], inputs["w"], inputs["d"]
    return {"forward": (x, w.t()), "backward": (d, w), "weight_grad": (d.t(), x)}[phase]


def deviation(result: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Error of a product as a multiple of its rounding error bound, [m, n], fp64; at most 1 if the product is correct.

    A sum of k products, each exact in fp32 or rounded once, added in any order with relative errors of at most u,
    differs from the exact one by at most g sum |a||b|, g = k u / (1 - k u); the rounding of the result is added to it.
    Here u is that of truncating fp32, and the fp64 reference has an error of the same form.

    The factors, [m, k] and [k, n], are as used; their device also computes the reference. Infinite where the result is
    not finite.

    Source: Higham 2002, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1.
    """
    a, b = left.double(), right.double()
    exact, size = a @ b, a.abs() @ b.abs()
    k = left.shape[1]
    steps = (k + 1) * (ACCUMULATED + 2.0**-52)
    own = torch.finfo(result.dtype)
    bound = steps / (1 - steps) * size
    bound += own.eps * (exact.abs() + bound) + own.tiny
    return ((result.double() - exact).abs() / bound).nan_to_num(torch.inf, torch.inf)


PASSES = 3
"""Number of times that each product is computed in a round: two outvote a wrong one. A fault's steps count passes over
all rounds."""

InjectorOfWidth = Callable[[int], Listener | None]
"""The injector for layers of a model of this width; None: none."""


@dataclass
class Products:
    """The products of one device, and their expected checksums by case.

    ``against`` is the source of these: ``golden``, or ``first``, the device's own earlier results.
    """

    device: torch.device
    injector_of: InjectorOfWidth = lambda hidden: None
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
            for dtype, kind in DTYPES.items():
                there = {name: tensor.to(self.device, kind) for name, tensor in inputs.items()}
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
            self._check(said, case, results[values.index(most)], *product_factors(inputs, phase))
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
        left, right = product_factors(inputs, phase)
        result = left @ right
        injector = self.injector_of(linear.hidden)
        answer = None if injector is None else injector(Address(step, 0, phase, linear.fqn, SLOTS[phase]), result)
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
        found = count_differences(case, most.cpu(), results[turn].cpu())
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
