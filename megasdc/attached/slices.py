"""Checks of slices of an attached training: the sum of its gradients over replicas, its optimizer's state and update.

The checks are those of our own runs (``megasdc.sdc.slice_checks``). Here are their view of the engine, and copies of
gradients just before DeepSpeed sums them: ZeRO 1 does so once a step, ZeRO 2 after each micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megasdc.attached.budget import GuardBudget
from megasdc.attached.protect import Obstacle
from megasdc.attached.record import ROOT
from megasdc.attached.training import Protection, Training
from megasdc.common.errors import ConfigError
from megasdc.config.guard import GuardAlwaysOnSection
from megasdc.optim.zero1 import is_bf16_optimizer
from megasdc.sdc.finding import Finding
from megasdc.sdc.slice_checks import Checkable, SliceChecks
from megasdc.sdc.slices import Slice
from megasdc.sdc.used_settings import UsedSettings

logger = logging.getLogger(__name__)

REDUCE_ONE, REDUCE_ALL = "reduce_independent_p_g_buckets_and_remove_grads", "buffered_allreduce_fallback"
"""Methods that sum gradients over replicas: of ZeRO's optimizer one parameter's, of the engine all."""
KINDS = (torch.optim.Adam, torch.optim.AdamW)


def check_slices(section: GuardAlwaysOnSection, engine: Any) -> None:
    """Refuse checks of slices that a guard cannot make.

    Raises:
        ConfigError: the optimizer or its settings are others; with every problem.
    """
    if not section.enabled or section.slice_elements is None:
        return
    got = f"sdc.always_on.slice_elements: got {section.slice_elements}"
    problems = [f"{got} with {one.why}; allowed: null, or {one.needed}." for one in slice_obstacles(engine)]
    if problems:
        raise ConfigError(problems)


def slice_obstacles(engine: Any) -> list[Obstacle]:
    """What forbids checks of slices with an engine; empty: nothing."""
    optimizer, found = engine.optimizer, []
    if not (is_bf16_optimizer(optimizer) or engine.zero_optimization_stage() in (1, 2)):
        why = "ZeRO 0, where no rank owns a shard, and sdc.always_on.parameters compares all parameters and states"
        found.append(Obstacle(why, "zero_optimization.stage 1 or 2"))
    inner = getattr(optimizer, "optimizer", optimizer)
    if type(inner) not in KINDS or any(group.get("amsgrad") for group in inner.param_groups):
        needed = (
            "Adam and AdamW of PyTorch without amsgrad, in DeepSpeed's configuration optimizer.params.torch_adam true"
        )
        found.append(Obstacle(f"the optimizer {type(inner).__module__}.{type(inner).__qualname__}", needed))
    unlike = {
        "zero_optimization.offload_optimizer": getattr(optimizer, "cpu_offload", False),
        "zero_optimization.round_robin_gradients": getattr(optimizer, "round_robin_gradients", False),
        "torch_autocast": getattr(optimizer, "torch_autocast_gradscaler", None) is not None,
        "managed_gradient_accumulation false": not engine.managed_gradient_accumulation(),
        "gradient_predivide_factor": engine.gradient_predivide_factor() != 1.0 or not engine.gradient_average,
    }
    return found + [Obstacle(name, f"no {name}") for name, is_set in unlike.items() if is_set]


class EngineView:
    """An attached engine as checks of the optimizer's step see it: ``sdc.host.StepEngine``.

    Attributes:
        step_number: number of the running step.
        scale: loss scale by which the gradients of the running step are multiplied.
    """

    def __init__(self, training: Training) -> None:
        engine = training.engine
        self._engine, self.dims, self.device = engine, training.dims, engine.device
        self.module, self.optimizer, self.data_parallel_group = (
            engine.module,
            engine.optimizer,
            engine.data_parallel_group,
        )
        self.lr_scheduler, self.communication_data_type = engine.lr_scheduler, engine.communication_data_type
        self.step_number, self.scale = training.step, 1.0

    @property
    def is_skipped(self) -> bool:
        """Whether the optimizer has skipped the step."""
        return bool(self.optimizer.overflow)

    @property
    def used_norm(self) -> Any:
        """Norm by which this rank has clipped in the last step, loss scale included; None: by none."""
        norm = self.optimizer._global_grad_norm
        return None if norm is None else norm * self.scale

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return bool(self._engine.fp16_enabled())

    def gradient_factor_of(self, parameter: Tensor) -> Tensor:
        """Factor of the mean of the replicas' gradients of one parameter, 0-d: 1."""
        return torch.ones((), dtype=torch.float64)


def names_of_parameters(engine: Any) -> dict[int, tuple[str, str]]:
    """Full name and slot of each parameter of an engine's model, by its id."""
    parts = {id(one): name.rpartition(".") for name, one in engine.module.named_parameters()}
    return {key: (fqn or ROOT, slot) for key, (fqn, _, slot) in parts.items()}


class LocalGradients:
    """Copies this rank's gradients of due slices each time that ZeRO's optimizer is about to sum them over replicas.

    Args:
        times: how often a parameter's gradient is summed in a step, at most.

    Attributes:
        parts: for each replica, this rank's part of its due slice, [times, numel]; NaN where a gradient was summed more
            often.
    """

    def __init__(self, optimizer: Any, times: int) -> None:
        self._optimizer, self._times = optimizer, times
        self.parts: list[Tensor | None] = []
        self._places: dict[int, list[tuple[Tensor, int, int, int]]] = {}
        """By id of a parameter: copy, place in it, and first and number of the parameter's elements there."""
        self._counts: dict[int, int] = {}
        self._sum = getattr(optimizer, REDUCE_ONE)
        setattr(optimizer, REDUCE_ONE, self._before_sum)

    def close(self) -> None:
        """Give the optimizer back its own method."""
        vars(self._optimizer).pop(REDUCE_ONE, None)

    @property
    def sums(self) -> int:
        """Largest number of sums of a parameter's gradient in this step."""
        return max(self._counts.values(), default=0)

    def begin(self, due: Sequence[Slice | None], parameter_of: Callable[..., Tensor]) -> None:
        """Begin a step; ``due``: the slice of each replica's shard, None: none, empty: the step looks at none."""
        kind, device = self._optimizer._gradient_reduction_buffer_dtype(), self._optimizer.device
        self.parts, self._places, self._counts = [], {}, {}
        for one in due:
            part = None if one is None else torch.zeros(self._times, one.numel, dtype=kind, device=device)
            self.parts.append(part)
            place = 0
            for group, piece in () if one is None else ((of.group, piece) for of in one.parts for piece in of.pieces):
                assert part is not None, "there is a slice"
                where = part, place, piece.offset, piece.numel
                self._places.setdefault(id(parameter_of(group, piece)), []).append(where)
                place += piece.numel

    def _before_sum(self, parameter: Any, *args: Any, **options: Any) -> Any:
        places = self._places.get(id(parameter), ())
        if places and getattr(parameter, "ds_grad_is_ready", True):
            time = self._counts.get(id(parameter), 0)
            self._counts[id(parameter)] = time + 1
            gradient = self._optimizer.get_gradient_for_reduction(parameter).detach().flatten()
            for part, place, first, count in places:
                if time < self._times:
                    part[time, place : place + count] = gradient[first : first + count]
                else:
                    part[:, place : place + count] = torch.nan
        return self._sum(parameter, *args, **options)


class GuardSlices(Protection):
    """Part of a guard that checks a slice of each shard in steps that look; made after ``check_slices``.

    Args:
        settle: settles a finding of a step that is taken; returns whether what is wrong is to be put right.
        table: returns the table of what is covered, from texts on what is within a tolerance now, by phase.

    Attributes:
        unclipped: the part that copies gradients which no other part changes any more.
    """

    name = "slices of the optimizer"

    def __init__(
        self,
        training: Training,
        settle: Callable[[int, Finding], bool],
        budget: GuardBudget,
        table: Callable[[Mapping[str, str]], list[str]],
    ) -> None:
        self._settle, self._table = settle, table
        self._training, self._view = training, EngineView(training)
        settings, engine, view = training.settings, training.engine, self._view
        always_on, optimizer = settings.sdc.always_on, engine.optimizer
        assert always_on.slice_elements is not None, "it is asked for"
        self._host = replace(training, engine=view)
        self._used = UsedSettings(self._host)
        sums_each = not is_bf16_optimizer(optimizer) and optimizer.partition_gradients
        times = self._times = int(engine.gradient_accumulation_steps()) if sums_each else 1
        self._checks = SliceChecks(
            *(
                always_on.slice_elements,
                self._act,
                self._report_weaker,
                budget.checks,
                self._used,
                Checkable(times=times),
            ),
            names=names_of_parameters,
        )
        self._checks.on_start(self._host)
        self._within: dict[str, str] = {}
        self._local: LocalGradients | None = None
        if is_bf16_optimizer(optimizer):
            self._sum = engine.buffered_allreduce_fallback
            engine.buffered_allreduce_fallback = self._before_sum
        else:
            self._local = LocalGradients(optimizer, times)
        self.unclipped = UnclippedProtection(self._checks)
        budget.add(self._begin)

    @property
    def period(self) -> int:
        """Number of looks after which each slice has been looked at."""
        return self._checks.period

    def close(self) -> None:
        """Remove all hooks, and give engine and optimizer back their own methods."""
        self._checks.close()
        self._used.close()
        if self._local is not None:
            self._local.close()
        else:
            vars(self._training.engine).pop(REDUCE_ALL, None)

    def forget(self) -> None:
        """Go on from state that was loaded, which is not what the last step left."""
        self._checks.forget()

    def _begin(self, step: int) -> None:
        self._view.step_number = step
        self._checks.before_step(self._host)
        if self._local is not None:
            self._local.begin(self._checks.due, self._checks.parameter_of)

    def _before_sum(self, *args: Any, **options: Any) -> Any:
        self._checks.before_reduction(self._view)
        return self._sum(*args, **options)

    def before_step(self, step: int) -> Iterable[Finding]:
        """Compare this rank's slices of the reduced gradient, and of the state that the last step left.

        Collective: the replicas, in steps that look.
        Sync: waits for the device, likewise.
        """
        if self._local is not None:
            if self._local.sums > self._times:
                self._training.events.emit("sdc", "sum_not_checked", step=step, sums=self._local.sums)
            self._checks.before_reduction(self._view, self._local.parts)
        self._view.scale = float(self._view.optimizer.loss_scale) if self._view.fp16_enabled() else 1.0
        self._checks.compare()
        return ()

    def after_step(self, step: int) -> None:
        """Check the update, and settle what was found.

        Raises:
            CorruptionExit: the policy is to halt; on all ranks.

        Collective: all ranks of the world.
        """
        self._checks.after_optimizer_step(self._view)

    def _act(self, step: int, find: Callable[[Collection[int]], Finding]) -> bool:
        found = find(self._training.suspects.ranks)
        return bool(found.rulings) and self._settle(step, found)

    def _report_weaker(self, texts: Mapping[str, str]) -> None:
        """Print the table of what is covered again, and write its event: checks compare less than it said."""
        self._within |= texts
        table, events = self._table(self._within), self._training.events
        events.emit_on_rank_0("sdc", "coverage", step=self._view.step_number, table=table, within=self._within)
        if events.rank == 0:
            logger.warning("coverage of silent data corruption from now on:\n%s", "\n".join(table))


class UnclippedProtection(Protection):
    """Part of a guard that copies the gradient which the optimizer is about to clip; the last before the optimizer."""

    def __init__(self, checks: SliceChecks) -> None:
        self._checks = checks

    def before_step(self, step: int) -> Iterable[Finding]:
        """Copy this rank's slice of the gradient."""
        self._checks.copy_unclipped()
        return ()
