"""The compute threshold that would have been best for the steps that a run recorded.

The search is that of a running job (``megasdc.dropcompute.threshold.search_recorded``), on steps without dropped
micro-batches and ended backward passes: times that a threshold cut short do not show the time that was needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.common.errors import DataError
from megasdc.config.drop_compute import ELAPSED, PREDICTIVE, DropComputeSection
from megasdc.dropcompute.threshold import Curve, Threshold, search_recorded
from megasdc.dropcompute.tuning import expected_times_s, measured_communication_s
from megasdc.lab.report.step_times import StepTimesOfRun

SIGMAS: float = DropComputeSection.model_fields["sigmas"].default


@dataclass(frozen=True)
class RunThreshold:
    """The best threshold of a run's steps.

    ``communication_s``: Tc, the time of a step that no threshold shortens, ``measured`` or given; ``threshold``: result
    for the rule ``elapsed``, which starts micro-batches before tau; ``predictive``: for the rule that starts those
    expected, with ``sigmas``, to end by tau; ``layers``: between which backward passes end at tau, 0: they are whole;
    ``ended_passes``: those of the steps that are not used.
    """

    times: StepTimesOfRun
    communication_s: float
    measured: bool
    max_drop_rate: float
    min_micro_batches: int
    threshold: Threshold
    sigmas: float
    predictive: Threshold
    layers: int
    ended_passes: int

    @property
    def rules(self) -> dict[str, Threshold]:
        """The results, by the name of the rule in `drop_compute`."""
        return {ELAPSED: self.threshold, PREDICTIVE: self.predictive}

    def best(self, rule: str) -> int:
        """Index of the best threshold in a rule's curve."""
        return self.rules[rule].curve.best(self.max_drop_rate)

    @property
    def replica_times_s(self) -> NDArray[np.float64]:
        """Compute times of replicas, [replica, step]."""
        return self.times.end_s[:, 0, :, -1]

    def at(self, rule: str, place: int) -> dict[str, Any]:
        """Results of the threshold at an index of a rule's curve as plain values; an infinite threshold is None."""
        curve = self.rules[rule].curve
        share, tau_s = float(curve.completed_share[place]), float(curve.thresholds_s[place])
        return {
            "tau_s": tau_s if math.isfinite(tau_s) else None,
            "speedup": float(curve.speedup[place]),
            "throughput": float(curve.throughput[place]),
            "completed": share * curve.micro_batches,
            "drop_rate": 1 - share,
            "time_s": float(curve.times_s[:, place].mean()),
            "late_steps": float((curve.times_s[:, place] > tau_s).mean()),
        }

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        times, curve = self.times, self.threshold.curve
        return {
            "run": str(times.run),
            "steps": {"first": int(times.steps[0]), "last": int(times.steps[-1]), "count": len(times.steps)},
            "replicas": curve.num_replicas,
            "stages": times.start_s.shape[1],
            "micro_batches": curve.micro_batches,
            "communication_s": self.communication_s,
            "communication_measured": self.measured,
            "max_drop_rate": self.max_drop_rate,
            "min_micro_batches": self.min_micro_batches,
            "layers": self.layers,
            "ended_passes": self.ended_passes,
            "longest_s": float(curve.longest_s.mean()),
            "mean_compute_s": float(self.replica_times_s.mean()),
            "best": self.at(ELAPSED, self.best(ELAPSED)),
            "curve": _plain(curve),
            PREDICTIVE: {
                "sigmas": self.sigmas,
                "best": self.at(PREDICTIVE, self.best(PREDICTIVE)),
                "curve": _plain(self.predictive.curve),
            },
            "notes": list(times.notes),
        }


def _plain(curve: Curve) -> dict[str, Any]:
    return {
        "tau_s": [*curve.thresholds_s[:-1].tolist(), None],
        "completed_share": curve.completed_share.tolist(),
        "speedup": curve.speedup.tolist(),
        "throughput": curve.throughput.tolist(),
        "time_s": curve.times_s.mean(axis=0).tolist(),
    }


def search_run(
    times: StepTimesOfRun,
    max_drop_rate: float,
    min_micro_batches: int,
    communication_s: float | None,
    sigmas: float = SIGMAS,
) -> RunThreshold:
    """Searches the threshold on the steps of a run without dropped micro-batches and ended backward passes.

    Backward passes end at it if those of the run's last start may, and the ends of forward passes are recorded.

    Args:
        max_drop_rate: largest permitted share of dropped micro-batches, in [0, 1].
        min_micro_batches: completed by every replica whatever the threshold, >= 1.
        communication_s: Tc; None: as measured.
        sigmas: of the predictive rule, see ``ClockDecisions``.

    Raises:
        ValueError: a wrong value.
        DataError: micro-batches were dropped, or backward passes ended, in every step.
    """
    if not 0 <= max_drop_rate <= 1:
        raise ValueError(f"max_drop_rate is {max_drop_rate}, needed 0 to 1")
    whole: NDArray[np.bool_] = np.asarray(times.is_whole.all(axis=0))
    if not whole.any():
        raise DataError(
            f"{times.run}: in all {len(times.steps)} recorded steps from {times.steps[0]} to {times.steps[-1]} "
            f"micro-batches were dropped{times.ended_too}, and a threshold is searched on steps without drops; name "
            'others with --first-step and --last-step, or record some with megasdc.drop_compute.threshold "inf"'
        )
    left, ended_passes = int((~whole).sum()), int(times.ended.sum())
    times = times.only(
        whole,
        f"{left} steps in which micro-batches were dropped{times.ended_too} are not used; the others are then the "
        "faster ones, and the threshold comes out too low: better name steps before a threshold was in force",
    )
    latest = times.planned == times.planned[-1]
    times = times.only(latest, f"steps with another number of micro-batches than {times.planned[-1]} are not used")
    measured = communication_s is None
    rest_s = (
        measured_communication_s(times.compute_s[:, 0], times.step_s[:, 0])
        if communication_s is None
        else communication_s
    )
    starts, ends, forward_ends = times.start_s[:, 0], times.end_s[:, 0], times.forward_end_s[:, 0]
    layers = times.of_layers
    if layers and np.isnan(forward_ends).any():
        layers, note = (
            0,
            "backward passes are taken as whole: of some steps the ends of forward passes are not recorded",
        )
        times = replace(times, notes=(*times.notes, note))
    found, predictive = (
        search_recorded(
            starts,
            ends,
            rest_s,
            max_drop_rate,
            min_micro_batches,
            expected_s=expected_times_s(starts, ends, rule_sigmas),
            layers=layers,
            forward_ends_s=forward_ends,
        )
        for rule_sigmas in (None, sigmas)
    )
    given = (times, rest_s, measured, max_drop_rate, min_micro_batches)
    return RunThreshold(*given, found, sigmas, predictive, layers, ended_passes)
