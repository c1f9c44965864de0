"""One rank of the live campaign for the toleranced checks.

The checks measure their thresholds on clean steps first; every trial goes on from there, with the same weights,
moments and thresholds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from megasdc.engine.engine import StepResult
from megasdc.events import Event
from megasdc.faults.injector import Firing
from megasdc.faults.stored import StateFaults
from megasdc.parallel.collectives import gather_objects
from megasdc.train.detection.build import build_detection, build_toleranced, watches_of
from megasdc.train.detection.coverage import plan_checks
from megasdc.train.detection.observe import ObserverSwitch, watch_for_faults
from megasdc.train.detection.toleranced import EVENT_KIND, TolerancedChecks
from megasdc.train.detection.update_check import SLICE
from megasdc.train.faults import build_injector
from megasdc.train.loop import train
from tools.bench.detection.live_cases import (
    ALWAYS,
    CLEAN,
    LASTING,
    OTHER,
    PERSISTENCE,
    TOLERANCED,
    TOLERANCED_ROWS,
    Case,
    deal_rows,
)
from tools.bench.detection.live_rank import KeptResults, LiveCampaign
from tools.bench.detection.live_setup import VOCABULARY
from tools.bench.detection.live_tolerance_sizes import Seen, Witness, feature_sizes
from tools.bench.detection.live_tolerance_trial import ToleranceTrial
from tools.bench.rank import Messages

WARM_UP = 30
"""Clean steps on which thresholds are measured; the last of them are known after 20."""
KINDS: dict[str, dict[str, Any]] = {
    **{f"x (1 + 1e{power})": {"kind": "scale", "factor": 1.0 + 10.0**power} for power in range(-7, 7)},
    "x -1e3": {"kind": "scale", "factor": -1e3},
    "16 elements x 10": {"kind": "scale", "factor": 10.0, "elements": 16},
    "16 elements x 1e4": {"kind": "scale", "factor": 1e4, "elements": 16},
    "1e30": {"kind": "value", "value": 1e30},
    "noise": {"kind": "noise", "deviation": 0.1, "elements": 16},
    "one bit": {"kind": "bit_flip"},
    "sign": {"kind": "bit_flip", "bits": "sign"},
    "exponent": {"kind": "bit_flip", "bits": "exponent"},
    "mantissa": {"kind": "bit_flip", "bits": "mantissa"},
}
"""Kinds of faults by name, each a part of a spec: all orders of size, at most as many elements as a firing lists."""


@dataclass(frozen=True)
class Done:
    """A rank's results of a run: the checks that are scored, its firings and events, and the result of each step.

    ``witness`` measures the sizes of faults; None in the warm-up.
    """

    checks: TolerancedChecks
    witness: Witness | None
    firings: Sequence[Firing]
    results: Sequence[StepResult]
    events: Sequence[Event]

    @property
    def seen(self) -> dict[int, Seen]:
        """Values that faults are measured against, by step."""
        assert self.witness is not None, "a warm-up is not measured"
        return self.witness.kept

    def is_skipped(self, step: int) -> bool:
        """Whether the optimizer did not take a step."""
        return next(one for one in self.results if one.step == step).skipped is not None

    def sizes_of_firings(self) -> dict[str, float]:
        """The largest size of a fault on any rank, in thresholds, by the check that looks at the changed value.

        Collective: all ranks of the world.
        """
        assert self.witness is not None, "a warm-up is not harmed"
        fired = [one for one in self.firings if one.changed and not self.is_skipped(one.address.step)]
        return largest_of_ranks([size for one in fired if (size := self.witness.size_of(one)) is not None])


def largest_of_ranks(sizes: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The largest size by check over all ranks.

    Collective: all ranks of the world.
    """
    found: dict[str, float] = {}
    for check, size in (one for of_rank in gather_objects(list(sizes)) for one in of_rank):
        found[check] = max(size, found.get(check, 0.0))
    return found


class ToleranceCampaign(LiveCampaign):
    """The engine of one rank after a clean warm-up, and trials with it; the request is ``LiveCampaign``'s.

    Collective: all ranks of the world.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request, KINDS)
        self.cases.twice = False
        flats = [flat for group in self._engine.optimizer.optimizer.param_groups for flat in group["params"]]
        self._parts = max(gather_objects(max(-(-flat.numel() // SLICE) for flat in flats)))
        self._state: dict[str, Any] | None = None
        warm_up = Case(CLEAN, 1, WARM_UP, "", (), (0,) * self.dims.data)
        self._state = self._train(warm_up).checks.state_dict()
        self._workload.save_start()

    # --- trials -------------------------------------------------------------------------------------------------

    def clean(self, steps: int) -> list[ToleranceTrial]:
        """Go on without a fault."""
        case = replace(self.cases.case(CLEAN), steps=steps)
        return [self._score(case, self._train(case), {}, covered=False)]

    def trial(self, row: str) -> list[ToleranceTrial]:
        """Go on with a fault of a row; where its size needs the same steps without it, those are a trial too."""
        case = self.cases.case(row)
        if row == LASTING:
            case = self._in_every_step(case)
        if row != OTHER:
            done = self._train(case)
            sizes = done.sizes_of_firings()
            return [self._score(case, done, sizes, covered=bool(sizes))]
        without = replace(case, row=CLEAN, targets=())
        clean, done = self._train(without), self._train(case)
        step = case.targets[0].address.step
        sizes = (
            {} if done.is_skipped(step) else largest_of_ranks(feature_sizes(clean.seen[step], done.seen[step]).items())
        )
        return [
            self._score(without, clean, {}, covered=False),
            self._score(case, done, sizes, covered=True),
        ]

    def _in_every_step(self, case: Case) -> Case:
        """Faults in the same elements until every slice was checked, and a step in which an audit may be called."""
        (target,) = case.targets
        step = target.address.step
        often = {"once": False, **PERSISTENCE[ALWAYS], "steps": [step, step + self._parts - 1]}
        target = replace(target, spec=target.spec.model_copy(update=often))
        return replace(case, steps=2 + self._parts, persistence=ALWAYS, targets=(target,))

    def _train(self, case: Case) -> Done:
        """Take a case's steps from the end of the warm-up."""
        config = self._configs[TOLERANCED]
        sections = config.megasdc.model_copy(update={"faults": [target.spec for target in case.targets]})
        run, kept = self._prepare(case)
        self._signals.take_audit_request()
        self._events.kept.clear()
        injector = build_injector(sections, run)
        plan = plan_checks(config, self._engine, VOCABULARY)
        detection = build_detection(config, run, kept, self._signals, injector, plan)
        checks = build_toleranced(sections, run, self._signals)
        assert checks is not None, "the section asks for it"
        witness = None
        if self._state is not None:
            checks.load_state_dict(self._state)
            first = self.dims.rank - self.dims.dp_rank * self.dims.tensor
            witness = Witness(self._engine, checks, self._state["features"][str(first)])
        watches = [] if injector is None else [watch_for_faults(injector, self._engine)]
        results = KeptResults()
        observation = ObserverSwitch(self._engine, [*watches, *watches_of(detection)])
        witnesses = [] if witness is None else [witness]
        faults = [] if injector is None else [StateFaults(self._engine, injector)]
        run.hooks = [detection, checks, *witnesses, *faults, observation, checks.shards, results]
        try:
            train(run)
        finally:
            run.hooks = []
        return Done(checks, witness, injector.firings if injector else [], results.kept, list(self._events.kept))

    def _score(self, case: Case, done: Done, sizes: dict[str, float], *, covered: bool) -> ToleranceTrial:
        """Reports of the checks; complete on rank 0, which writes events."""
        step = case.targets[0].address.step if case.targets else 0
        said = [one for one in done.events if one.kind == EVENT_KIND]
        return ToleranceTrial(
            **self._cell(),
            row=case.row,
            kind=" and ".join(target.kind for target in case.targets),
            address=" and ".join(str(target.address) for target in case.targets),
            ranks=case.ranks,
            steps=case.steps,
            fault_step=step,
            harmed=any(gather_objects(any(one.changed for one in done.firings))),
            skipped=bool(step) and done.is_skipped(step),
            covered=covered,
            sizes=sizes,
            thresholds=done.seen[case.first_step].thresholds,
            warnings=tuple((one.step or 0, one.fields["check"]) for one in said if one.name == "warning"),
            audit=any((one.kind, one.name) == ("audit", "requested") for one in done.events),
            accused=tuple(
                one.fields["rank"] for one in said if one.name == "verdict" and one.fields["rank"] is not None
            ),
        )


def run_tolerance_campaign(messages: Messages, request: dict[str, Any]) -> None:
    """Run as a rank, and report the trials of each case, of which the first is the clean one."""
    campaign = ToleranceCampaign(request)
    messages.send(trials=campaign.clean(request["clean_steps"]))
    for row in deal_rows(TOLERANCED_ROWS, request["faults"], campaign.draw):
        messages.send(trials=campaign.trial(row))
    dist.barrier()
    campaign.close()
