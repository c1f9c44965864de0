"""Matrix products of the stress test: shapes, inputs, and the error bound of a correct result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasdc.model.randomness import mix

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


def factors(inputs: dict[str, Tensor], phase: str) -> tuple[Tensor, Tensor]:
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
