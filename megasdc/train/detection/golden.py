"""The golden workload, and verification of a running job's ranks against a golden trace.

The workload has seeded weights and tokens and a few steps, and is restartable any number of times. A run computes it in
a second model beside its own, and the micro-batches of its first step are compared: they do not depend on the number of
replicas, so a trace of one replica serves every replica. It detects what the comparison of replicas cannot: a fault
that all of them have in common.
"""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megasdc.common.addresses import MICRO_BATCH_PHASES, PHASES, Address
from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout
from megasdc.config.deepspeed import MONITORS
from megasdc.config.load import RunConfig, parse_config
from megasdc.config.sections import GoldenSection
from megasdc.data.loader import MicroBatch
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook
from megasdc.engine.observer import Listener, Observer
from megasdc.model.randomness import mix
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.groups import own_model_groups
from megasdc.sdc.golden import (
    AFFECTED,
    DIVERGENT,
    Case,
    Golden,
    GoldenAnswer,
    GoldenRun,
    compare_ranks,
    compare_run,
    describe_differences,
    load_golden,
    load_header,
    trace_gaps,
)
from megasdc.sdc.host import Host, on_all_ranks
from megasdc.sdc.trace import Trace
from megasdc.sdc.tracer import Tracer, choose_submodules
from megasdc.sdc.verdict import INCONCLUSIVE
from megasdc.tensors.checksum import algorithm
from megasdc.train.build_engine import build_training_engine
from megasdc.train.detection.golden_key import compare_key
from megasdc.train.process import StartClock

logger = logging.getLogger(__name__)

UNREADABLE = "cannot read it"
"""What ranks without their golden file cannot do, for messages."""


WORKLOAD_SECTIONS = ("model", "parallel", "data", "golden", "trace", "determinism", "logging")
"""Sections of which the golden workload is made; the others are as if they were not given."""


def workload_config(config: RunConfig) -> RunConfig:
    """The configuration of the golden workload of a run's configuration.

    Batch sizes are those of the ``golden`` section. What the workload does not compute is reset - bounds and hooks,
    faults and delays, checks, saves, health - so that nothing of it can contradict the workload's few steps. It is
    deterministic even if the run is not.
    """
    raw = config.resolved()
    golden = config.megasdc.golden
    for name in ("train_batch_size", *MONITORS):
        raw.pop(name, None)
    raw["train_micro_batch_size_per_gpu"] = golden.micro_batch_size
    raw["gradient_accumulation_steps"] = golden.micro_batches
    sections = {name: raw["megasdc"][name] for name in WORKLOAD_SECTIONS}
    sections["model"]["initial_weights"] = None
    sections["determinism"]["enabled"] = True
    sections["training"] = {"steps": golden.steps, "seed": config.megasdc.training.seed}
    return parse_config(raw | {"megasdc": sections}, source=config.source, stored=True)


def workload_cases(config: RunConfig) -> tuple[Case, ...]:
    """Every set of inputs: each sequence length with each seed."""
    golden = config.megasdc.golden
    lengths = golden.sequence_lengths or [config.megasdc.data.sequence_length]
    return tuple(Case(seed, length) for length in lengths for seed in range(golden.seeds))


class Workload:
    """The engine of one rank and its start state.

    Args:
        config: from ``workload_config``.

    Collective: all ranks of the world.
    """

    def __init__(self, config: RunConfig, dims: ParallelDims) -> None:
        self.section: GoldenSection = config.megasdc.golden
        layout = check_layout(config, dims.world_size)
        with own_model_groups():
            self.engine = build_training_engine(config, layout, dims, self.section.vocab_size, StartClock(0.0))
        self.engine.lr_scheduler = None  # a warmup from zero would hide the updates of the first steps
        for group in self.engine.optimizer.param_groups:
            group["lr"] = config.deepspeed["optimizer"]["params"]["lr"]
        self._trace = config.megasdc.trace
        every = list_submodules(self.engine.module)
        self.submodules = choose_submodules(every, self._trace.granularity, self._trace.layers)
        self._length: int | None = None
        self.save_start()

    def run(
        self,
        case: Case,
        listeners: Sequence[Listener],
        hooks: Sequence[Hook] = (),
        steps: int | None = None,
    ) -> list[StepResult]:
        """Run the workload's steps from its start state, with listeners on its results.

        Args:
            listeners: listeners of an ``Observer``: a tracer, and before it fault injection.
            hooks: hooks of the engine that are called before the observer.
            steps: number of steps; None: all.

        Collective: all ranks of the world.
        """
        self.reset()
        if self._length != case.sequence_length:
            self.engine.reset_activation_shape()
            self._length = case.sequence_length
        with ExitStack() as undo:
            undo.callback(setattr, self.engine, "hooks", self.engine.hooks)
            self.engine.hooks = [*self.engine.hooks, *hooks]
            undo.callback(Observer(self.engine, self.submodules, listeners).close)
            batches = self._batches(case)
            return [self.engine.train_step(batches) for _ in range(steps or self.section.steps)]

    def trace(
        self,
        case: Case,
        algorithm_name: str,
        before: Sequence[Listener] = (),
        hooks: Sequence[Hook] = (),
        *,
        all_steps: bool = False,
        steps: int | None = None,
    ) -> Trace:
        """Run once and return the trace.

        Args:
            before: listeners that are called before the tracer.
            hooks: hooks of the engine that are called before the observer.
            all_steps: whether a run in which the optimizer skips a step is refused, for recording.
            steps: number of steps; None: all.

        Raises:
            ConfigError: with ``all_steps``: a step was skipped.

        Collective: all ranks of the world.
        """
        tracer = Tracer(algorithm(algorithm_name), self._trace)
        results = self.run(case, [*before, tracer], hooks, steps)
        skipped = next((result for result in results if result.skipped), None)
        if all_steps and skipped is not None:
            remedy = f"lower fp16's loss scale ({skipped.loss_scale:g} here) by fp16.initial_scale_power"
            raise ConfigError(
                f"the golden workload skips step {skipped.step}: {skipped.skipped}; such a step updates nothing that "
                f"could be verified; {remedy if self.engine.fp16_enabled() else 'lower the learning rate'}"
            )
        return tracer.pop_trace()

    def _batches(self, case: Case) -> Iterator[MicroBatch]:
        """Micro-batches of all steps, the same on every replica, so that a replica's place has no effect."""
        shape = (self.section.micro_batch_size, case.sequence_length + 1)
        mask = torch.ones(shape[0], case.sequence_length)
        for number in range(self.section.steps * self.section.micro_batches):
            generator = torch.Generator().manual_seed(mix(case.seed, number))
            tokens = torch.randint(0, self.section.vocab_size, shape, generator=generator)
            yield tokens[:, :-1].contiguous(), (tokens[:, 1:].contiguous(), mask)

    # --- the start ----------------------------------------------------------------------------------------------

    def save_start(self) -> None:
        """Make the current weights, optimizer state and loss scale the start state of runs."""
        optimizer = self.engine.optimizer
        inner = optimizer.optimizer
        self._flats = [flat for group in inner.param_groups for flat in group["params"]]
        tensors = [*self.engine.module.parameters(), *self._flats]
        self._start = [(value, value.detach().clone()) for value in tensors]
        self._states = {flat: copy.deepcopy(inner.state[flat]) for flat in self._flats if flat in inner.state}
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._scaler = copy.deepcopy(getattr(optimizer, "loss_scaler", None))

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the start state of weights, optimizer and counters.

        Sync: none.
        """
        engine, optimizer = self.engine, self.engine.optimizer
        for value, start in self._start:
            value.data.copy_(start)
        inner = optimizer.optimizer
        for flat in self._flats:
            saved = self._states.get(flat)
            if saved is None:
                inner.state.pop(flat, None)
                continue
            for name, value in saved.items():
                if isinstance(value, torch.Tensor):
                    inner.state[flat][name].copy_(value)
                else:
                    inner.state[flat][name] = copy.deepcopy(value)
        for group, start in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(start))
        if self._scaler is not None:
            optimizer.loss_scaler.__dict__.update(copy.deepcopy(self._scaler.__dict__))
        engine.global_steps = engine.global_samples = engine.micro_steps = engine.skipped_steps = 0
        optimizer.zero_grad()

    def release(self) -> None:
        """Release process groups and memory of weights, gradients and optimizer; nothing can be computed afterwards.

        DeepSpeed's hooks in the autograd graph keep a reference to the model, so it would not be freed otherwise.

        Collective: all ranks of the world.
        """
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "destroy"):
            optimizer.destroy()
        for value in (one for pair in self._start for one in pair):
            value.grad = None
            value.data = value.data.new_empty(0)
        optimizer.optimizer.state.clear()
        optimizer.__dict__.clear()  # flat copies and buckets
        self._start.clear()
        self._states.clear()
        self.engine.module.destroy_groups()


class GoldenCheck:
    """Runs a golden workload on all ranks of a run, and reports what was found.

    ``before`` are listeners that inject faults; ``keep``: whether the second model is kept for the next time.
    """

    def __init__(self, path: Path, host: Host, before: Sequence[Listener] = (), *, keep: bool = False) -> None:
        self.path = path
        self._keep = keep
        self._kept: _Beside | None = None
        self._host, self._dims = host, host.dims
        self._before = tuple(before)

    def unfit(self) -> list[str]:
        """Reasons why ranks cannot be compared with the trace, one for each such rank; empty: all can.

        Raises:
            TraceError: the file is missing or damaged where some rank reads it; on all ranks.

        Collective: all ranks of the world.
        """
        own = on_all_ranks(self._host, lambda: unfit_for(self.path, self._dims), UNREADABLE)
        return [reason for reason in gather_objects(own, self._host.host_group) if reason]

    def run(self, step: int, repeats: int = 0) -> GoldenAnswer:
        """Run the workload once, and if a rank differs ``repeats`` more times; fault injection gets ``step``.

        Raises:
            TraceError: the file is missing or damaged where some rank reads it; on all ranks.

        Collective: all ranks of the world.
        Sync: waits for the device. Needs memory for a second model with its optimizer, which is released unless it is
        kept.
        """
        start = time.perf_counter()
        beside = self._kept
        if beside is None:  # each host may have a file of its own
            part = on_all_ranks(self._host, lambda: _own_part(self.path, self._dims), UNREADABLE)
            beside = _Beside(part, self._dims)
        self._kept = beside if self._keep else None
        before = [_at_step(listener, step) for listener in self._before]
        answer = compare_ranks(self._host, partial(beside.run, before), self._dims, beside.gaps, repeats)
        if not self._keep:
            beside.workload.release()
            del beside
            gc.collect()  # a model has reference cycles, and managed collection may be far off
        answer = replace(answer, seconds=time.perf_counter() - start)
        self._report(step, answer)
        return answer

    def _report(self, step: int, answer: GoldenAnswer) -> None:
        wrong, received, unclear = (answer.ranks(status) for status in (DIVERGENT, AFFECTED, INCONCLUSIVE))
        found = {"compared": answer.compared, "wrong": wrong, "affected": received, "inconclusive": unclear}
        self._host.events.emit_on_rank_0("sdc", "golden", step=step, **found, seconds=answer.seconds)
        if self._dims.rank == 0:
            logger.info(
                "step %d: golden trace: %d results compared in %.1f s, ranks that differ: %s",
                step,
                answer.compared,
                answer.seconds,
                ", ".join(map(str, sorted({*wrong, *received, *unclear}))) or "none",
            )


def _golden_rank(layout: ParallelDims, dims: ParallelDims) -> int:
    """The rank of the golden trace's first replica at the same stage and tensor rank."""
    return dims.tp_rank + layout.tensor * layout.data * dims.pp_rank


def _own_part(path: Path, dims: ParallelDims) -> Golden:
    return load_golden(path, _golden_rank(ParallelDims(**load_header(path)["layout"]), dims))


class _Beside:
    """The workload on this rank, in a model of its own.

    Collective: all ranks of the world, ``run`` too.
    """

    def __init__(self, golden: Golden, dims: ParallelDims) -> None:
        self._dims = dims
        self._golden, layout = golden, golden.layout
        self._rank = _golden_rank(layout, dims)
        self.cases = len(self._golden.cases)
        config = parse_config(self._golden.config, stored=True)
        recomputes = bool(config.recompute_interval)
        trace = config.megasdc.trace
        not_compared = {"interval": 1, "phases": [*trace.phases, *(set(PHASES) - set(MICRO_BATCH_PHASES))]}
        self.gaps = trace_gaps(trace.model_copy(update=not_compared), recomputes)
        self.workload = Workload(config, dims)
        # Dropout masks depend on a sample's index in the batch, so all replicas use those of the first recorded one.
        self.workload.engine.dims = replace(layout, rank=self._rank)

    def run(self, before: Sequence[Listener]) -> list[GoldenRun]:
        """Run the first step of each case."""
        runs = []
        for number, case in enumerate(self._golden.cases):
            got = self.workload.trace(case, self._golden.algorithm, before, steps=1)
            runs.append(compare_run(_first_step(self._golden.traces[number, self._rank]), _first_step(got), self._dims))
        return runs


def unfit_for(path: Path, dims: ParallelDims) -> str | None:
    """Reason why this rank cannot be compared with a golden trace; None: it can.

    Raises:
        TraceError: the file is missing or damaged.
    """
    header = load_header(path)
    layout = ParallelDims(**header["layout"])
    if (layout.tensor, layout.pipeline) != (dims.tensor, dims.pipeline):
        return f"the golden trace is of {layout}, the run has {dims}: tensor and pipeline must be equal"
    differences = compare_key(header)[1]
    if differences:
        return describe_differences(differences)
    return None


def _at_step(listener: Listener, step: int) -> Listener:
    def listen(address: Address, result: Tensor) -> Tensor | None:
        return listener(replace(address, step=step), result)

    return listen


def _first_step(trace: Trace) -> Trace:
    """Part of a trace with the first step's micro-batches, whose results depend on no sum over replicas."""
    kept = [
        (address, value)
        for address, value in zip(trace.addresses, trace.checksums, strict=True)
        if address.step == 1 and address.phase in MICRO_BATCH_PHASES
    ]
    return Trace([address for address, _ in kept], [value for _, value in kept])
