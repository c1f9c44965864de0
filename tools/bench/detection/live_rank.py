"""One rank of the live campaign.

Each trial is a short run of the real loop with the real checks, from the same weights. All ranks draw the same cases;
the first reports what was found.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.common.addresses import WEIGHT_GRAD, Address
from megasdc.config.load import RunConfig, parse_config
from megasdc.config.sections import TraceSection
from megasdc.data.loader import MicroBatchLoader, StepBatches
from megasdc.data.position import Position
from megasdc.dropcompute.gate import ReplayedDecisions, ReplicaGate, StepDecisions, new_replica_group
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run, RunProgress
from megasdc.engine.observer import ObserverSwitch, Watch
from megasdc.events import Event, EventLog
from megasdc.faults.drill import build_injector, watch_for_faults
from megasdc.faults.injector import Firing, Injector
from megasdc.faults.stored import StateFaults
from megasdc.model.randomness import mix
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.referee.recompute import LINEAR
from megasdc.sdc.trace import Trace
from megasdc.sdc.tracer import Tracer
from megasdc.tensors.checksum import default_algorithm
from megasdc.train.detection.budget import plan_checks
from megasdc.train.detection.findings import EVENT_KIND
from megasdc.train.detection.golden import Workload, workload_config
from megasdc.train.detection.step_checker import build_detection, watches_of
from megasdc.train.main import train
from megasdc.train.signals import StopSignals
from tools.bench.detection.golden_rank import KINDS, MODEL, VOCABULARY, campaign_config, record_golden
from tools.bench.detection.live_cases import (
    AUDITED,
    CHECKED,
    CLEAN,
    EVERYTHING,
    GOLDEN,
    PERMUTED,
    SLICED,
    SUMMED,
    Case,
    Cases,
    deal_rows,
    weights_of_rows,
)
from tools.bench.detection.live_trial import LiveTrial, Named
from tools.bench.rank import Messages, join_ranks

LENGTH, MICRO_BATCHES = MODEL["max_positions"], 2
WARN = dict.fromkeys(("persistent", "intermittent", "not_reproduced", "inconclusive"), "warn")
"""Policy with which every trial ends, whatever is found."""
AUDIT = {"enabled": True, "interval": 1, "granularity": "gemm"}
ALWAYS_ON = {"enabled": True, "coverage": "all", "granularity": "gemm"}
ROWS_ONLY = {"enabled": True, "coverage": "one", "recompute": False, "parameters": False, "finite": False, "rows": True}
WHOLE_SHARDS = 1_000_000
"""Elements of a slice, so many that the two groups of the optimizer take turns."""


def live_config(request: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one layout and type, without what detects."""
    dropout = dict.fromkeys(("hidden_dropout", "attention_dropout"), request["dropout"])
    sections = {
        "training": {"steps": 1000},
        "determinism": {"enabled": True},
        "trace": {"granularity": "gemm"},
        "golden": {"vocab_size": VOCABULARY, "steps": 1, "micro_batches": MICRO_BATCHES},
    }
    raw = campaign_config(request, 2, MICRO_BATCHES, model=dropout, **sections)
    if request["recompute"]:
        raw["pipeline"] = {"activation_checkpoint_interval": 1}
    return raw


class RandomTokens:
    """A stream of seeded random tokens, another sample at each position."""

    path = "seeded random tokens"
    vocab_size = VOCABULARY

    def __init__(self, seed: int, num_samples: int) -> None:
        self.identity = f"random {seed}"
        self._seed = seed
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def extend(self, num_samples: int) -> None:
        """Make the stream at least so long."""
        self._num_samples = max(self._num_samples, num_samples)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [s], labels [s], loss mask [s]."""
        generator = torch.Generator().manual_seed(mix(self._seed, position))
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        return tokens[:-1], tokens[1:], torch.ones(LENGTH)

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, drawn anew."""
        return self[position]


def detecting(raw: dict[str, Any], mode: str, golden: Path) -> RunConfig:
    """The configuration of ``live_config`` with the checks of a mode of ``tools.bench.detection.live_cases``."""
    sdc: dict[str, Any] = {"policy": WARN}
    if mode in (CHECKED, EVERYTHING):
        sdc["always_on"] = ALWAYS_ON
    if mode == GOLDEN:
        sdc["golden"] = str(golden)
    if mode == EVERYTHING:
        sdc["always_on"] = {**ALWAYS_ON, "slice_elements": WHOLE_SHARDS}
    if mode == SUMMED:
        sdc["always_on"] = ROWS_ONLY
    audit = {**AUDIT, "permuted": mode in (PERMUTED, EVERYTHING)}
    sections = {**raw["megasdc"], "sdc": sdc} | ({} if mode in (CHECKED, SUMMED) else {"audit": audit})
    return parse_config({**raw, "megasdc": sections})


class KeptEvents(EventLog):
    """An event log that also keeps what it wrote."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self.kept: list[Event] = []

    def emit(self, kind: str, name: str, **fields: Any) -> Event:
        """Write and keep one event."""
        event = super().emit(kind, name, **fields)
        self.kept.append(event)
        return event


class KeptResults(Hook):
    """Keeps the result of each step."""

    def __init__(self) -> None:
        self.kept: list[StepResult] = []

    def after_step(self, run: Run, result: StepResult) -> None:
        """Keep it."""
        self.kept.append(result)


class LiveCampaign:
    """The engine of one rank, and trials with it; ``tools.bench.detection.live`` makes the request.

    Collective: all ranks of the world.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        raw = live_config(request)
        config = workload_config(parse_config(raw))
        tensor, pipeline, _ = request["layout"]
        self.dims = join_ranks(tensor, pipeline, timeout_s=300.0)
        self._folder = Path(request["folder"])
        self._workload = Workload(config, self.dims)
        self._engine = self._workload.engine
        self._algorithm = default_algorithm(self._engine.device)
        golden = self._folder / "campaign.golden"
        addresses = record_golden(self._workload, config, self.dims, golden)
        modes = (AUDITED, GOLDEN, CHECKED, EVERYTHING, PERMUTED, SUMMED)
        self._configs = {name: detecting(raw, name, golden) for name in modes}
        self._stream = RandomTokens(request["seed"], 100_000)
        self._events = KeptEvents(self._folder, self.dims.rank)
        self._signals = StopSignals()
        self.draw = random.Random(request["seed"])
        layout = ParallelDims(self.dims.tensor, self.dims.pipeline, self.dims.data)
        self._decisions = ReplayedDecisions(self.dims.dp_rank)
        group = new_replica_group(self.dims)
        self._gate = ReplicaGate(self.dims, group, self._decisions.decide, self._decisions.time_left_s, 1)
        linear = gather_objects([one.fqn for one in list_submodules(self._engine.module) if one.kind in LINEAR])
        self.cases = Cases(addresses, layout, KINDS, request["precision"], self.draw, MICRO_BATCHES, linear)

    # --- one trial ----------------------------------------------------------------------------------------------

    def run(self, case: Case) -> list[LiveTrial]:
        """Train a few steps with a case's faults; a clean case gives one trial a step."""
        config = self._configs[case.mode]
        sections = config.megasdc.model_copy(update={"faults": [target.spec for target in case.targets]})
        run, kept = self._prepare(case)
        injector = build_injector(sections, run)
        gradients = Tracer(self._algorithm, TraceSection(phases=[WEIGHT_GRAD], micro_batches=[0]))
        results = KeptResults()
        plan = plan_checks(config, self._engine, VOCABULARY)
        in_golden = None if injector is None else InGolden(injector)
        detection = build_detection(config, run, kept, self._signals, in_golden, plan)
        watches = [] if injector is None else [watch_for_faults(injector, self._engine)]
        if case.mode in (AUDITED, GOLDEN):
            watches.append(Watch(gradients, detection.audited_submodules))
        observation = ObserverSwitch(self._engine, [*watches, *watches_of(detection)])
        faults = [] if injector is None else [StateFaults(self._engine, injector)]
        slices = detection.slices
        checks: list[Hook | None] = [slices, detection.rows, detection.tokens]
        before, after = (
            [one for one in checks if one is not None],
            [] if slices is None else [slices.found, slices.unclipped],
        )
        run.hooks = [detection, *before, *faults, observation, *after, results]
        self._events.kept.clear()
        if case.completed:
            self._decisions.begin(StepDecisions(MICRO_BATCHES, case.completed))
            self._engine.gate = self._gate
        try:
            train(run)
        finally:
            if slices is not None:
                slices.close()
            run.hooks = []
            self._engine.gate = None
        self._gate.finish()
        firings = _all_of(injector.firings if injector else [])
        golden = {one.rank for one in _all_of(in_golden.firings if in_golden else []) if one.changed}
        replayed = any(gather_objects(differs_from_repeat(gradients.pop_trace())))
        if case.row == CLEAN:
            return [self._clean(result, case.uneven) for result in results.kept]
        return [self._harmed(case, firings, golden, results.kept, replayed)]

    def _prepare(self, case: Case) -> tuple[Run, StepBatches]:
        self._workload.reset()
        self._engine.global_steps = case.first_step - 1
        self._engine.reset_activation_shape()
        loader = MicroBatchLoader(
            self._stream, 1, self.dims.dp_rank, self.dims.data, Position(case.consumed[self.dims.dp_rank])
        )
        kept = StepBatches(loader, loader)
        progress = RunProgress(case.first_step + case.steps - 1, case.first_step - 1)
        run = Run(self._folder, self.dims, self._engine, loader, kept, self._events, dist.group.WORLD, progress)
        return run, kept

    def _named(self, step: int | None = None) -> tuple[tuple[Named, ...], bool]:
        """Verdicts of a step, or of all, and whether anything was found."""
        found = [one for one in self._events.kept if one.kind == EVENT_KIND and (step is None or one.step == step)]
        named = tuple(
            Named(
                **{name: one.fields[name] for name in ("tier", "rank", "verdict", "basis")},
                address=one.fields["address"] or "",
            )
            for one in found
            if one.name == "verdict"
        )
        return named, any(one.name in ("verdict", "finding") for one in found)

    def _cell(self) -> dict[str, Any]:
        return {
            "layout": "x".join(map(str, (self.dims.tensor, self.dims.pipeline, self.dims.data))),
            "precision": self._request["precision"],
            "recompute": self._request["recompute"],
            "dropout": bool(self._request["dropout"]),
        }

    def _clean(self, result: StepResult, uneven: bool) -> LiveTrial:
        named, found = self._named(result.step)
        return LiveTrial(
            **self._cell(),
            uneven=uneven,
            row=CLEAN,
            detected=found,
            named=named,
            loss=result.loss,
            grad_norm=result.grad_norm,
        )

    def _harmed(
        self,
        case: Case,
        firings: Sequence[Firing],
        golden: Set[int],
        results: Sequence[StepResult],
        replayed: bool,
    ) -> LiveTrial:
        """The trial; ``golden``: ranks whose golden workload got a fault that changed a bit."""
        named, found = self._named()
        repeats = self._configs[case.mode].megasdc.sdc.repeats
        step = case.targets[0].address.step
        steps = (step, step + 1) if case.row in SLICED else (step,)
        live = {rank: [one for one in firings if one.rank == rank and one.address.step in steps] for rank in case.ranks}
        harmed = tuple(
            rank
            for rank, of_rank in live.items()
            if self._is_harmed(case, of_rank, found) or (found and rank in golden)
        )
        alike = [len(live[rank]) > repeats and len(set(map(_done, live[rank]))) == 1 for rank in harmed]
        result = next(one for one in results if one.step == step)
        return LiveTrial(
            **self._cell(),
            uneven=case.uneven,
            row=case.row,
            persistence=case.persistence,
            kinds=tuple(target.kind for target in case.targets),
            ranks=case.ranks,
            addresses=tuple(str(target.address) for target in case.targets),
            harmed=harmed,
            shows=tuple(str(one.shows) for one in case.targets if one.shows is not None and one.rank in harmed),
            largest_change=max((_change(one) for of_rank in live.values() for one in of_rank), default=0.0),
            reproduced=bool(alike) and all(alike),
            golden_harmed=bool(harmed) and golden >= set(harmed),
            detected=found,
            named=named,
            loss=result.loss,
            grad_norm=result.grad_norm,
            replayed=replayed,
        )

    def _is_harmed(self, case: Case, of_rank: Sequence[Firing], found: bool) -> bool:
        """Whether a fault, with these firings, changed what is compared; ``found``: something was found.

        It may change only what is computed elsewhere, or what is in a slice one step later: then either is right.
        """
        changes = [bool(one.changed) for one in of_rank]
        if found and (case.row in SLICED or case.mode in (PERMUTED, EVERYTHING)):
            return any(changes)
        return bool(changes) and all(changes if case.row in SLICED else changes[:1])

    def close(self) -> None:
        """Give back signal handlers and files."""
        self._signals.close()
        self._events.close()


class InGolden:
    """Injects faults into the golden workload; their firings are moved here from those of the run."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self.firings: list[Firing] = []

    def __call__(self, address: Address, result: Tensor) -> Tensor | None:
        """A listener."""
        count = len(self._injector.firings)
        changed = self._injector(address, result)
        self.firings += self._injector.firings[count:]
        del self._injector.firings[count:]
        return changed


def _all_of(own: list[Firing]) -> list[Firing]:
    """Those of all ranks."""
    return [one for of_rank in gather_objects(own) for one in of_rank]


def _change(firing: Firing) -> float:
    """Largest change of an element that a fault made, as a share of its value before."""
    pairs = zip(firing.before, firing.after, strict=True)
    shares = [abs(after - before) / abs(before) if before else math.inf for before, after in pairs if before != after]
    return max((math.inf if math.isnan(one) else one for one in shares), default=0.0)


def _done(firing: Firing) -> tuple[Any, ...]:
    return firing.indices, firing.bits_before, firing.bits_after


def differs_from_repeat(trace: Trace) -> bool:
    """Whether a rank's gradients of a micro-batch differ from those of its first repeat; false if none was repeated.

    The trace holds the micro-batch and its repeats, one after the other.
    """
    if not trace:
        return False
    again = next((place for place, one in enumerate(trace.addresses) if place and one == trace.addresses[0]), 0)
    return bool(again) and trace.checksums[:again] != trace.checksums[again : 2 * again]


def run_campaign(messages: Messages, request: dict[str, Any]) -> None:
    """Run as a rank, and report the trials of each case; ``tools.bench.detection.live`` makes the request."""
    campaign = LiveCampaign(request)
    weights = weights_of_rows(campaign.dims.data, recompute=request["recompute"])
    rows = deal_rows(weights, request["faults"], campaign.draw)
    for place in range(request["clean_runs"]):
        rows.insert(place * len(rows) // request["clean_runs"], CLEAN)
    for done, row in enumerate(rows, 1):
        messages.send(trials=campaign.run(campaign.cases.case(row)))
        messages.progress(request["name"], done, len(rows))
    dist.barrier()
    campaign.close()
