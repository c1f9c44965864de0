"""Choice of the elements that a fault hits: row-major indices, the same on every device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from megasdc.config import FaultSpec


def pick_elements(result: Tensor, spec: FaultSpec, draws: np.random.Generator) -> Tensor:
    """Choose the elements that a fault hits: [n] distinct row-major indices, int64, on the result's device, maybe none.

    With a range of values, random indices are drawn among the elements in range; other patterns drop those out of
    range.

    Sync: waits for the device if a range is given.
    """
    within = _in_range(result, spec)
    if spec.pattern == "random":
        among = None if within is None else within.flatten().nonzero().flatten()
        places = torch.from_numpy(_random(result.numel() if among is None else among.numel(), spec, draws))
        places = places.to(result.device)
        return places if among is None else among[places]
    places = torch.from_numpy(_placed(result, spec, draws)).to(result.device)
    return places if within is None else places[within.flatten()[places]]


def _in_range(result: Tensor, spec: FaultSpec) -> Tensor | None:
    if spec.only_above is None and spec.only_below is None:
        return None
    size = result.abs()
    low = size >= (spec.only_above or 0.0)
    return low if spec.only_below is None else low & (size <= spec.only_below)


def _random(numel: int, spec: FaultSpec, draws: np.random.Generator) -> np.ndarray:
    if spec.element_probability is None:
        count = min(spec.elements, numel)
    else:
        count = int(draws.binomial(numel, spec.element_probability))
    return np.sort(draws.choice(numel, count, replace=False, shuffle=False)).astype(np.int64)


def _placed(result: Tensor, spec: FaultSpec, draws: np.random.Generator) -> np.ndarray:
    numel = result.numel()
    if numel == 0:
        return np.empty(0, np.int64)
    if spec.pattern == "indices":
        return np.array(sorted({place for place in spec.indices or () if place < numel}), np.int64)
    if spec.pattern == "column":
        width = result.shape[-1] if result.dim() else 1
        columns = np.sort(draws.choice(width, min(spec.elements, width), replace=False))
        return (np.arange(numel // width)[:, None] * width + columns).ravel()
    if spec.pattern == "adjacent":
        count = min(spec.elements, numel)
        return draws.integers(numel - count + 1) + np.arange(count)
    assert spec.period is not None, "checked when the spec was taken"
    return _periodic(numel, spec.elements, spec.period, spec.run, draws)


def _periodic(numel: int, elements: int, period: int, run: int, draws: np.random.Generator) -> np.ndarray:
    """Runs of ``run`` elements, one every ``period``, from a random start such that all fit, if they can."""
    runs = math.ceil(elements / run)
    extent = (runs - 1) * period + run
    start = int(draws.integers(max(1, numel - extent + 1)))
    runs, run = min(runs, math.ceil(numel / period)), min(run, numel)  # limited to what can fit
    places = (start + np.arange(runs)[:, None] * period + np.arange(run)).ravel()[:elements]
    return places[places < numel]
