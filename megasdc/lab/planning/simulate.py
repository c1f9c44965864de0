"""Simulation of DropCompute: drawn latencies, all thresholds tried on them, and the closed forms for comparison.

The formulas use only the mean and standard deviation of a micro-batch's latency and assume independence, so they
disagree with the simulation where latencies are correlated: one slow replica, bursts. They are for eq. 6, in which
the micro-batch in progress at tau is lost, and for one stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.dropcompute.threshold import (
    Curve,
    DropRule,
    exact_longest,
    expected_completed,
    expected_longest,
    expected_speedup,
    extra_steps_share,
    make_curve,
    micro_batch_times,
    published_speedup,
)
from megasdc.lab.planning.environment import DelayEnvironment
from megasdc.output.figure import number_or_none

_CHUNK = 1 << 20
"""Approximate number of latencies in memory at once."""
_ENOUGH = 1 << 22
"""Approximate number of latencies drawn if ``Simulation.steps`` is 0."""
_SHOWN = 100_000
"""Largest number of replica times kept for a plot."""
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Simulation:
    """Parameters of one simulation.

    Args:
        micro_batches: M, of a step of each replica.
        communication_s: Tc, time of a step that no threshold shortens: the all-reduce and the optimizer.
        max_drop_rate: largest share of micro-batches that may be dropped, in [0, 1].
        steps: to draw; 0: about 4 million latencies' worth, at most 1,000.
        training_steps: of the planned training run, for the number of extra steps.
        thresholds: number of finite thresholds tried.
    """

    replicas: int
    micro_batches: int
    stages: int = 1
    communication_s: float = 0.0
    max_drop_rate: float = 1.0
    steps: int = 0
    training_steps: int = 10_000
    rule: DropRule = field(default_factory=DropRule)
    thresholds: int = 200

    def __post_init__(self) -> None:
        for name in ("replicas", "micro_batches", "stages", "training_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, needed at least 1")
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}, needed at least 1, or 0 for a number that fits")
        if self.thresholds < 2:
            raise ValueError(f"thresholds is {self.thresholds}, needed at least 2")
        if self.rule.min_micro_batches > self.micro_batches:
            raise ValueError(
                f"min_micro_batches is {self.rule.min_micro_batches}, more than the {self.micro_batches} of a step"
            )
        if not 0 <= self.communication_s < math.inf:
            raise ValueError(f"communication_s is {self.communication_s}, needed a finite number of seconds >= 0")
        if not 0 <= self.max_drop_rate <= 1:
            raise ValueError(f"max_drop_rate is {self.max_drop_rate}, needed 0 to 1")

    @property
    def num_steps(self) -> int:
        """Number of steps drawn."""
        each = self.replicas * self.micro_batches * self.stages
        return self.steps or min(1000, max(1, _ENOUGH // each))


@dataclass(frozen=True)
class LatencyMoments:
    """Mean mu, standard deviation s and maximum of the drawn latencies of one micro-batch on one stage."""

    mean_s: float
    std_s: float
    largest_s: float


@dataclass(frozen=True)
class Formulas:
    """Results of the closed forms for the drawn moments.

    Args:
        longest_s: E[T] by eq. 4; None for one replica.
        exact_longest_s: E[T] of normal times by quadrature.
        completed_share: E[M~] / M by eq. 5, [threshold]; None where started micro-batches are finished.
        speedup: S_eff, [threshold]; None in the same case.
        published_speedup: S_eff with E[T] of eq. 4, [threshold]; None in the same case, and for one replica.
    """

    longest_s: float | None
    exact_longest_s: float
    completed_share: NDArray[np.float64] | None
    speedup: NDArray[np.float64] | None
    published_speedup: NDArray[np.float64] | None


@dataclass(frozen=True)
class SimulationResult:
    """Parameters and results of one simulation.

    Args:
        formulas: None where they do not apply: several stages, or latencies that are all the same.
        replica_times_s: compute times of replicas without drops, for a plot: those of the first steps, at most 100,000,
            [time].
    """

    simulation: Simulation
    moments: LatencyMoments
    curve: Curve
    formulas: Formulas | None
    replica_times_s: NDArray[np.float64]

    @property
    def best(self) -> int:
        """Index of the best threshold in the curve."""
        return self.curve.best(self.simulation.max_drop_rate)

    @property
    def longest_error_s(self) -> float | None:
        """Standard error of the mean of T; None for one step."""
        longest = self.curve.longest_s
        return float(longest.std(ddof=1) / math.sqrt(len(longest))) if len(longest) > 1 else None

    def at(self, place: int) -> dict[str, Any]:
        """Results at the threshold with this index in the curve, in plain values; an infinite threshold is None."""
        curve = self.curve
        share = float(curve.completed_share[place])
        extra = extra_steps_share(1 - share)
        found: dict[str, Any] = {
            "tau_s": number_or_none(curve.thresholds_s[place]),
            "speedup": float(curve.speedup[place]),
            "throughput": float(curve.throughput[place]),
            "completed": share * self.simulation.micro_batches,
            "drop_rate": 1 - share,
            "time_s": float(curve.times_s[:, place].mean()),
            "extra_steps": math.ceil(extra * self.simulation.training_steps) if math.isfinite(extra) else None,
        }
        completed, speedup = self._formula_curves()
        found["formula_completed"] = None if completed is None else completed[place] * self.simulation.micro_batches
        found["formula_speedup"] = None if speedup is None else speedup[place]
        return found

    def _formula_curves(self) -> tuple[list[float] | None, list[float] | None]:
        found = (self.formulas.completed_share, self.formulas.speedup) if self.formulas else (None, None)
        return _listed(found[0]), _listed(found[1])

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        curve, formulas = self.curve, self.formulas
        completed, speedup = self._formula_curves()
        columns = {
            "tau_s": [number_or_none(tau) for tau in curve.thresholds_s],
            "completed_share": curve.completed_share.tolist(),
            "speedup": curve.speedup.tolist(),
            "throughput": curve.throughput.tolist(),
            "time_s": curve.times_s.mean(axis=0).tolist(),
            "formula_completed_share": completed,
            "formula_speedup": speedup,
            "published_speedup": None if formulas is None else _listed(formulas.published_speedup),
        }
        return {
            "simulation": asdict(self.simulation) | {"steps": self.simulation.num_steps},
            "latency": asdict(self.moments),
            "longest": {
                "simulated_s": float(curve.longest_s.mean()),
                "error_s": self.longest_error_s,
                "formula_s": formulas.longest_s if formulas else None,
                "exact_s": formulas.exact_longest_s if formulas else None,
            },
            "best": self.at(self.best),
            "curve": columns,
        }


@dataclass(frozen=True)
class SimulationResults:
    """Simulations of the same environment, by rising number of replicas."""

    environment: DelayEnvironment
    results: tuple[SimulationResult, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        return {"environment": self.environment.as_dict(), "results": [result.as_dict() for result in self.results]}


def simulate_thresholds(
    simulation: Simulation, environment: DelayEnvironment, on_progress: OnProgress
) -> SimulationResult:
    """Draw latencies and try every threshold on them.

    Latencies are drawn twice and never all in memory: some 100 MiB, whatever the number of replicas.

    Args:
        on_progress: called with the name of the work, how much is done, and the total.

    Returns:
        The same for the same arguments.

    Raises:
        ConfigError: no step takes any time.
        DataError: recorded latencies are fewer than a step has.
    """
    steps, micro_batches, stages = simulation.num_steps, simulation.micro_batches, simulation.stages
    size = max(1, _CHUNK // (micro_batches * stages))
    total = 2 * steps * -(-simulation.replicas // size)
    sums = _Sums(simulation, total, on_progress)

    def chunks() -> Iterator[tuple[int, NDArray[np.float64]]]:
        for step in range(steps):
            for first in range(0, simulation.replicas, size):
                stop = min(first + size, simulation.replicas)
                latencies = environment.draw(step + 1, first, stop, micro_batches, stages)
                sums.add(latencies)
                yield step, latencies

    sizes = simulation.replicas, steps, micro_batches
    curve = make_curve(chunks, sizes, simulation.communication_s, simulation.rule, simulation.thresholds)
    moments = sums.moments()
    times = np.concatenate(sums.times)
    return SimulationResult(simulation, moments, curve, _formulas(simulation, moments, curve), times)


class _Sums:
    """Running moments of the latencies, in the first of the two passes."""

    def __init__(self, simulation: Simulation, total: int, on_progress: OnProgress) -> None:
        self._count, self._mean, self._squares, self._largest = 0, 0.0, 0.0, 0.0
        self._all = simulation.replicas * simulation.num_steps * simulation.micro_batches * simulation.stages
        self._done, self._total, self._on_progress = 0, total, on_progress
        self._forward_share = simulation.rule.forward_share
        self._name = f"{simulation.replicas:,} replicas, drawn twice"
        self.times: list[NDArray[np.float64]] = []

    def add(self, latencies: NDArray[np.float64]) -> None:
        self._done += 1
        self._on_progress(self._name, self._done, self._total)
        if self._count == self._all:
            return
        if (room := _SHOWN - sum(map(len, self.times))) > 0:
            self.times.append(micro_batch_times(latencies[:room], self._forward_share, finish=False)[1][:, -1])
        count, mean = latencies.size, float(latencies.mean())
        ahead = mean - self._mean  # means and squares of parts are merged as by Chan et al. 1979
        self._squares += float(latencies.var()) * count + ahead**2 * self._count * count / (self._count + count)
        self._count += count
        self._mean += ahead * count / self._count
        self._largest = max(self._largest, float(latencies.max()))

    def moments(self) -> LatencyMoments:
        return LatencyMoments(self._mean, math.sqrt(self._squares / self._count), self._largest)


def _formulas(simulation: Simulation, moments: LatencyMoments, curve: Curve) -> Formulas | None:
    if simulation.stages > 1 or moments.std_s <= 1e-9 * moments.mean_s:
        return None
    replicas, micro_batches = simulation.replicas, simulation.micro_batches
    mean, std = micro_batches * moments.mean_s, math.sqrt(micro_batches) * moments.std_s
    longest = expected_longest(replicas, mean, std) if replicas > 1 else None
    exact = exact_longest(replicas, mean, std)
    if simulation.rule.finish:
        return Formulas(longest, exact, None, None, None)
    one = (moments.mean_s, moments.std_s)
    completed = expected_completed(curve.thresholds_s, micro_batches, *one) / micro_batches
    speedup = expected_speedup(curve.thresholds_s, replicas, micro_batches, *one, simulation.communication_s)
    published = None
    if replicas > 1:
        published = published_speedup(curve.thresholds_s, replicas, micro_batches, *one, simulation.communication_s)
    return Formulas(longest, exact, completed, speedup, published)


def _listed(values: NDArray[np.float64] | None) -> list[float] | None:
    return None if values is None else values.tolist()  # type: ignore[no-any-return]
