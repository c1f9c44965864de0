"""Traces of a run's steps (``trace``), and what each step was made of (``trace.details``); files in the run folder.

A trace is one file for each rank, written after each step. Details: see ``DetailsWriter``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from megasdc.common.addresses import FORWARD, Address
from megasdc.config.load import RunConfig
from megasdc.config.sections import TraceSection
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.observer import Watch
from megasdc.metrics.writer import DetailsWriter, ParameterDetails, SampleLosses, StepDetails
from megasdc.model.kinds import LOSS_FQN
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import Fragment, counts_here, loss_scale, owned_fragments
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.tracer import Tracer, TrainingTrace, choose_submodules
from megasdc.tensors.checksum import algorithm, default_algorithm


class TraceRecorder(Hook):
    """Writes what the tracer recorded in a step to this rank's file, which is created after the first step."""

    def __init__(self, run: Run, tracer: Tracer, config: RunConfig) -> None:
        sections = config.megasdc
        recorded = {"granularity", "phases", "interval", "micro_batches", "layers"}
        header = {
            "sequence_parallel": sections.parallel.sequence_parallel,
            "seed": sections.training.seed,
            "config_digest": config_digest(config),
            **sections.trace.model_dump(mode="json", include=recorded),
        }
        self._tracer = tracer
        self._trace = TrainingTrace(run, tracer.algorithm, config.precision, header)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Append the step's checksums; the first time also if there are none, so that every rank has a file."""
        trace = self._tracer.pop_trace()
        if trace or not self._trace.is_open:
            self._trace.append(result.step, trace)

    def close(self) -> None:
        """Close the file."""
        self._trace.close()


def build_tracer(section: TraceSection, engine: TrainingEngine) -> Tracer | None:
    """The tracer of this rank; None where the section is not enabled. ConfigError: results cannot be observed."""
    if not section.enabled:
        return None
    chosen = choose_submodules(list_submodules(engine.module), section.granularity, section.layers)
    checksums = default_algorithm(engine.device) if section.algorithm is None else algorithm(section.algorithm)
    return Tracer(checksums, section, [submodule.fqn for submodule in chosen])


def watch_for_trace(tracer: Tracer) -> Watch:
    """The watch of a tracer, in the steps that it records."""
    names = tracer.fqns or frozenset()
    return Watch(tracer, lambda step: names if tracer.records(step) else frozenset())


def config_digest(config: RunConfig) -> str:
    """SHA-256 of the settings that affect the computation.

    Excluded are settings that change no result: where a run writes, what it saves, reports and records, and when it
    pauses.
    """
    resolved = config.resolved()
    for section in ("logging", "checkpoint", "trace"):
        resolved["megasdc"].pop(section)
    for field in ("eval_interval", "eval_samples", "time_limit_s", "stop_step"):
        resolved["megasdc"]["training"].pop(field)
    resolved["megasdc"]["parallel"].pop("timeout_s")
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()


class DetailsRecorder(Hook):
    """Records each step; on rank 0 into ``details.jsonl`` of the run folder. Keeps a copy of the rank's fp32 weights.

    Args:
        run: at the step from which it continues.

    Raises:
        ConfigError: the submodules' results cannot be observed.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        submodules = list_submodules(run.engine.module)
        self._names = {
            id(parameter): f"{one.fqn}.{slot}" for one in submodules for slot, parameter in one.parameters.items()
        }
        self._losses: dict[int, list[float]] = {}
        self._sums: dict[str, _Sums] = {}
        self._before: dict[str, Tensor] = {}
        self._writer = DetailsWriter(run.folder) if run.dims.rank == 0 else None

    @property
    def watch(self) -> Watch:
        """The watch of the losses of all tokens."""
        return Watch(self._record_losses, lambda step: {LOSS_FQN}, gradients=False)

    def _record_losses(self, address: Address, result: Tensor) -> None:
        """Listener that keeps the loss of each sample, from token losses [b, s]; waits for the device."""
        if (address.phase, address.fqn, address.slot) == (FORWARD, LOSS_FQN, "output"):
            assert address.micro_batch is not None, "forward results belong to a micro-batch"
            self._losses[address.micro_batch] = result.detach().double().mean(dim=1).tolist()

    def _counted(self, engine: TrainingEngine) -> list[tuple[str, Fragment]]:
        """The owned parts of parameters that count on this rank, each once in the model."""
        return [
            (self._names[id(one.parameter)], one)
            for one in owned_fragments(engine.optimizer)
            if counts_here(one.parameter, engine.dims.tp_rank)
        ]

    @torch.no_grad()
    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Sum up gradients, weights and moments; waits for the device."""
        scale = loss_scale(engine)
        self._sums, self._before = {}, {}
        for name, fragment in self._counted(engine):
            moment = fragment.states(engine.optimizer).get("exp_avg_sq")
            self._before[name] = fragment.master.clone()
            self._sums[name] = _Sums()
            self._sums[name].add_gradient(fragment.gradient, scale)
            self._sums[name].weights = _squares(fragment.master)
            self._sums[name].moments = 0.0 if moment is None else float(moment.double().sum())

    @torch.no_grad()
    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Sum up the changes by the update; waits for the device."""
        for name, fragment in self._counted(engine):
            self._sums[name].updates = _squares(fragment.master.double() - self._before[name].double())
        self._before = {}

    def after_step(self, run: Run, result: StepResult) -> None:
        """Gather and write the step.

        Collective: all ranks of the world.
        """
        dims = run.dims
        own = [SampleLosses(dims.dp_rank, number, losses) for number, losses in sorted(self._losses.items())]
        answers = gather_objects((own if dims.tp_rank == 0 else [], self._sums), run.host_group)
        self._losses = {}
        if self._writer is None:
            return
        totals: defaultdict[str, _Sums] = defaultdict(_Sums)
        for _, sums in answers:
            for name, one in sums.items():
                totals[name].add(one)
        samples = [one for losses, _ in answers for one in losses]
        self._writer.write(
            StepDetails(
                step=result.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                samples=sorted(samples, key=lambda one: (one.replica, one.micro_batch)),
                parameters={name: one.details() for name, one in totals.items()},
            )
        )

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class _Sums:
    """Sums over elements of a parameter: of squares, but for moments and non-finite gradients; the largest gradient."""

    def __init__(self) -> None:
        self.gradients = self.largest = self.weights = self.updates = self.moments = 0.0
        self.non_finite = 0

    def add_gradient(self, gradient: Tensor | None, scale: float) -> None:
        """Take the owned part of a gradient, divided by a loss scale."""
        if gradient is None:
            return
        values = gradient.double() / scale
        self.gradients = float(values.square().sum())
        self.largest = float(values.abs().max())
        self.non_finite = int((~torch.isfinite(values)).sum())

    def add(self, other: _Sums) -> None:
        """Add the sums of another part of the same parameter."""
        for name in ("gradients", "weights", "updates", "moments", "non_finite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = math.nan if math.isnan(self.largest + other.largest) else max(self.largest, other.largest)

    def details(self) -> ParameterDetails:
        """The norms of the whole parameter."""
        return ParameterDetails(
            gradient_norm=math.sqrt(self.gradients),
            largest_gradient=self.largest,
            non_finite=self.non_finite,
            weight_norm=math.sqrt(self.weights),
            update_norm=math.sqrt(self.updates),
            moment_norm=math.sqrt(self.moments),
        )


def _squares(value: Any) -> float:
    return float(value.double().square().sum())
