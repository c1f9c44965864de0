"""Building the checks of a run from the sections `audit` and `sdc`.

The referee of a run: its submodules are Megatron-core's, and those that are no modules lie between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from megasdc.common.addresses import OF_AUDIT, Address
from megasdc.config.load import RunConfig
from megasdc.config.problems.detection import asks_golden
from megasdc.config.sections.detection import AlwaysOnSection
from megasdc.config.sections.megasdc import MegasdcSection
from megasdc.config.sections.optimizer_hooks import AFTER_NORM, LOCAL
from megasdc.data.loader import StepBatches
from megasdc.engine.hooks import Run
from megasdc.engine.observer import Listener
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.kinds import LOSS
from megasdc.model.submodules import Submodule, list_submodules
from megasdc.sdc.referee.recompute import BETWEEN, Call, Exhibit, make_exhibit
from megasdc.sdc.referee.referee import Referee, Subject
from megasdc.tensors.checksum import default_algorithm
from megasdc.train.detection.budget import CheckBudget
from megasdc.train.detection.coverage import CheckPlan, coverage_table
from megasdc.train.detection.finding_policy import FindingPolicy
from megasdc.train.detection.golden_key import golden_key
from megasdc.train.detection.incidents import Incidents
from megasdc.train.detection.nonfinite import NonFiniteSearch
from megasdc.train.detection.observe import ObserverSwitch, Watch
from megasdc.train.detection.parameters import ParameterReader
from megasdc.train.detection.slices.hook import Checkable
from megasdc.train.detection.step_checker import CheckSettings, StepChecker
from megasdc.train.gradient_bounds import momentum_reset_of
from megasdc.train.signals import StopSignals


def build_referee(run: Run) -> Referee:
    """The referee of a run's stage."""
    submodules = {one.fqn: one for one in list_submodules(run.engine.module)}
    loss = run.engine.module.loss_fn

    def subject_of(fqn: str) -> Subject | None:
        submodule = submodules.get(fqn)
        if submodule is None:
            return None
        kind = submodule.kind

        def make(address: Address, kept: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | None:
            calls, after = kept
            return make_exhibit(address, kind, calls, result, after)

        return Subject(_modules_of(submodule, list(submodules.values()), loss), [make])

    return Referee(subject_of, run.dims.rank, run.host_group)


def _modules_of(submodule: Submodule, all_of_them: Sequence[Submodule], loss: Any) -> tuple[Any, Any]:
    """Where the calls of a submodule are seen; of one that is no module, those before and after it."""
    if submodule.kind == LOSS:
        return loss, None
    if submodule.kind not in BETWEEN:
        return submodule.module, None
    block = {one.kind: one.module for one in all_of_them if one.layer == submodule.layer}
    before, after = BETWEEN[submodule.kind]
    return block.get(before), block.get(after)


def detects(sections: MegasdcSection) -> bool:
    """Whether a run has any check while it trains."""
    return sections.audit.enabled or sections.sdc.always_on.enabled or asks_golden(sections)


def build_detection(
    config: RunConfig,
    run: Run,
    batches: StepBatches,
    signals: StopSignals,
    injector: Listener | None,
    plan: CheckPlan,
    writer: MetricsWriter | None = None,
) -> StepChecker:
    """Build the checks of each step of a run.

    Args:
        batches: this replica's micro-batches.
        injector: injects faults into the golden workload; None: nothing does.
        plan: what is covered.
        writer: where rank 0 writes what the checks took; None: nowhere.
    """
    sections, dims = config.megasdc, run.dims
    algorithm = default_algorithm(run.engine.device)
    parameters = ParameterReader(run.engine, algorithm)
    keys = golden_key(config, dims.at(0), algorithm.name)
    referee = build_referee(run)
    disputes = FindingPolicy(
        sections.sdc,
        run,
        keys,
        parameters,
        Incidents(config, run),
        referee,
        () if injector is None else (injector,),
    )
    disputes.settings.reset = momentum_reset_of(sections.optimizer_hooks)
    settings = CheckSettings(
        sections.audit,
        sections.sdc,
        algorithm,
        recomputes=bool(config.deepspeed.get("pipeline", {}).get("activation_checkpoint_interval")),
        save_interval=sections.checkpoint.interval,
        checkable=Checkable(
            sums=not any(spec.where == LOCAL for spec in sections.optimizer_hooks),
            clips=not any(spec.where == AFTER_NORM for spec in sections.optimizer_hooks),
        ),
        drops=sections.drop_compute,
    )
    budget = CheckBudget(plan, run.engine, writer)
    detection = StepChecker(settings, run, batches, disputes, parameters, signals, budget, referee)
    detection.table = partial(coverage_table, config, run.engine, plan)
    return detection


def watches_of(detection: StepChecker) -> list[Watch]:
    """The watches of the checks."""
    moved, audited = detection.permuted, (detection.record_audited, detection.referee.listen)
    return [
        *(Watch(listener, detection.audited_submodules) for listener in audited),
        *(Watch(partial(_of_audit, one), detection.submodules_of_extra, replays=True) for one in audited),
        Watch(detection.record_checked, detection.checked_submodules, gradients=False),
        Watch(detection.record_finite, detection.finite_submodules),
        *([] if detection.rows is None else [Watch(detection.rows.listen, detection.row_submodules)]),
        *([] if moved is None else [Watch(moved.listen, detection.audited_submodules, replays=True)]),
    ]


def _of_audit(listener: Listener, address: Address, result: Tensor) -> None:
    """Tell a listener that a result is of the audit's extra micro-batch, which the engine numbers as the first."""
    listener(replace(address, micro_batch=OF_AUDIT), result)


def build_search(
    section: AlwaysOnSection, detection: StepChecker, run: Run, observation: ObserverSwitch
) -> NonFiniteSearch | None:
    """Build the search for the first NaN or Inf; None where it is not enabled.

    Args:
        section: checks of every step.
        observation: provides the run's results.
    """
    if not (section.enabled and section.finite):
        return None
    return NonFiniteSearch(run, observation, detection.recompute_micro_batch)
