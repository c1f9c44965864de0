"""One rank of the overhead benchmark.

Every step has one kind of check or none. What is ours: the listeners with the observer that calls them, everything that
``StepChecker`` does between and in steps, reductions over the ranks included, and for an audit attaching the observer
and taking it away again, which in other steps stays where it is. Before the comparison the ranks meet, in steps without
checks too: else the reduction would be charged with waiting for a slower rank, which the sum of gradients right after
it would have to do as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.config.detection import AuditSection, SdcSection
from megasdc.config.load import RunConfig
from megasdc.config.sections import DeterminismSection
from megasdc.determinism import set_deterministic
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.observer import ObserverSwitch
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import StepAgreement, gather_objects
from megasdc.train.detection.budget import measure_rates, measure_speed, plan_checks
from megasdc.train.detection.step_checker import StepChecker, build_detection, build_search, watches_of
from megasdc.train.main import train_step
from megasdc.train.signals import StopSignals
from tools.bench.clocks import Clock, Timed, TimedAgreement, TimedObserver, wait_for_device
from tools.bench.detection.overhead_model import (
    ALWAYS_ON,
    ALWAYS_ON_ALL,
    AUDIT,
    BETWEEN,
    CHAIN,
    KEPT,
    PERMUTED,
    ROWS,
    SLICES,
    STEPS,
    TOKENS,
)
from tools.bench.rank import Messages, join_ranks, take_turns
from tools.bench.small.runs import memory_run
from tools.bench.training.options import TrainBenchOptions, run_config

SLICE = 16384
"""Elements of a slice of the optimizer."""
INTERVAL = 50
"""Steps between audits, where the run keeps all checks within its budget."""
NEVER = 1 << 40
"""Interval of audits that is never reached."""
NOTHING = {
    "enabled": True,
    "coverage": "one",
    **dict.fromkeys(("recompute", "parameters", "finite", "rows", "chain", "tokens"), False),
}
"""Checks of every step, each switched off."""
APART = {"enabled": True, "chain": False, "tokens": False}
"""Those at their defaults, but for two that are measured alone."""
SECTIONS: dict[str, dict[str, Any]] = {
    ALWAYS_ON: {"sdc": {"always_on": {**APART, "coverage": "one"}}},
    ALWAYS_ON_ALL: {"sdc": {"always_on": {**APART, "coverage": "all"}}},
    AUDIT: {"audit": {"enabled": True, "interval": 1}},
    BETWEEN: {"audit": {"enabled": True, "interval": NEVER}},
    ROWS: {"sdc": {"always_on": {**NOTHING, "rows": True}}},
    CHAIN: {"sdc": {"always_on": {**NOTHING, "chain": True, "coverage": "all"}}},
    TOKENS: {"sdc": {"always_on": {**NOTHING, "tokens": True, "coverage": "all"}}},
    PERMUTED: {"audit": {"enabled": True, "interval": 1, "permuted": True}},
    SLICES: {"sdc": {"always_on": {**APART, "slice_elements": SLICE}}},
    KEPT: {
        "sdc": {"always_on": {"enabled": True, "rows": True, "slice_elements": SLICE}},
        "audit": {"enabled": True, "interval": INTERVAL},
    },
}
"""Checks that each kind of step switches on; of that before the last the slices alone are made, and the last is that of
steps in a row."""


class PhaseObserver(TimedObserver):
    """An observer whose time is also measured by phase."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._by_phase = Clock()
        super().__init__(*arguments, **more)

    def _emit(self, address: Address, result: Tensor) -> Tensor | None:
        if self._engine.is_replaying:
            return super()._emit(address, result)
        return self._by_phase.timed(address.phase, super()._emit, address, result)

    @property
    def parts(self) -> dict[str, float]:
        """Time of listening by phase, and of the observer itself."""
        return {**self._by_phase.parts, "observer": self.own_s - self._by_phase.total_s}


class Meeting(Hook):
    """Has the ranks wait for each other when they have computed their gradients."""

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """Wait."""
        dist.barrier()


class TimedReplays(Hook):
    """Adds up the time of replays, as the clock's part ``replay``."""

    in_replays = True

    def __init__(self, clock: Clock) -> None:
        self._parts, self._began = clock.parts, 0.0

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """It begins."""
        self._began = time.perf_counter()

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """It ends, if it was one."""
        if engine.is_replaying:
            self._parts["replay"] = self._parts.get("replay", 0.0) + time.perf_counter() - self._began

    before_backward, after_backward = before_forward, after_forward


class OverheadRank:
    """The engine of a rank, and steps with each kind of check; a block is one step of each kind.

    Args:
        kept: how many steps ``run_with_budget`` may take in all.

    Collective: all ranks of the world.
    """

    def __init__(self, options: TrainBenchOptions, folder: Path, kept: int = 0) -> None:
        plain = run_config(options, folder)
        recomputing = {**plain.deepspeed, "pipeline": {"activation_checkpoint_interval": 1}}
        self._config = replace(plain, deepspeed=recomputing)
        sections = self._config.megasdc
        set_deterministic(DeterminismSection.model_validate({"enabled": True}))  # replicas are to agree bit for bit
        self.dims = join_ranks(threads=options.threads, timeout_s=sections.parallel.timeout_s)
        steps = (options.blocks + 1) * (len(STEPS) + 1) + kept  # one kind takes two
        self._run, self._batches = memory_run(self._config, self.dims, options.vocab, steps, folder)
        self.engine = self._run.engine
        self._submodules = list_submodules(self.engine.module)
        self._signals = StopSignals()
        alone = [name for name in SECTIONS if name not in (CHAIN, KEPT)]
        self._detections = {name: self._build(self._changed(name)) for name in alone}

    def _changed(self, name: str) -> RunConfig:
        sections = SECTIONS[name]
        update = {
            "sdc": SdcSection.model_validate(sections.get("sdc", {})),
            "audit": AuditSection.model_validate(sections.get("audit", {})),
        }
        return replace(self._config, megasdc=self._config.megasdc.model_copy(update=update))

    def _build(self, config: RunConfig) -> StepChecker:
        plan = plan_checks(config, self.engine, self._run.loader.dataset.vocab_size)
        detection = build_detection(config, self._run, self._batches, self._signals, None, plan)
        always_on = config.megasdc.sdc.always_on
        detection.search = build_search(always_on, detection, self._run, ObserverSwitch(self.engine, []))
        place, detection.place = detection.place, None  # steps of other kinds move it
        if place is not None:  # in a run it is agreed on with what other hooks agree on in each step
            detection.fields = tuple(one for one in detection.fields if one is not place.completed)
        detection.on_start(self._run)
        return detection

    # --- one step -----------------------------------------------------------------------------------------------

    def step(self, name: str) -> dict[str, Any]:
        """Take one step of a kind.

        Returns:
            Wall time and the time inside our calls by part, of the rank on which the latter is the larger share.

        Collective: all ranks of the world.
        """
        self.engine.hooks = [Meeting()]
        self._batches.begin(None)
        clock = Clock()
        self.engine.agreement = TimedAgreement(clock, self._run.host_group)
        if name == SLICES:
            with self._slicing(clock) as slices:
                wall_s = self._wall(slices)
        elif name == CHAIN:
            wall_s = self._linking_step(clock)
        elif name in self._detections:
            wall_s = self._detecting_step(name, clock)
        else:
            wall_s = self._wall()
        found = gather_objects((wall_s, clock.parts))
        wall_s, parts = max(found, key=lambda one: sum(one[1].values()) / one[0])
        return {"wall_s": wall_s, "parts": parts}

    def run_with_budget(self, steps: int) -> dict[str, Any]:
        """Take steps in a row with all checks at their defaults, as a run does that keeps them within its budget.

        Returns:
            ``cadence`` at the end, and ``share``, what the run says that checks took of the last 100 steps.

        Collective: all ranks of the world.
        """
        config, run, engine = self._changed(KEPT), self._run, self.engine
        plan = plan_checks(config, engine, run.loader.dataset.vocab_size, measure_speed(config, engine), run.host_group)
        writer = MetricsWriter(run.folder) if self.dims.rank == 0 else None
        detection = build_detection(config, run, self._batches, self._signals, None, plan, writer)
        observation = ObserverSwitch(engine, watches_of(detection), detection.budget.looks)
        detection.search = build_search(config.megasdc.sdc.always_on, detection, run, observation)
        slices = detection.slices
        assert slices is not None and detection.rows is not None, "the section asks for it"
        chain, tokens = detection.chain, detection.tokens
        assert chain is not None and tokens is not None, "they are on by default"
        reading: list[Hook] = [slices.found, chain, slices.unclipped, chain.sums]
        hooks = [Meeting(), detection, slices, detection.rows, tokens, observation, *reading]
        engine.hooks, engine.agreement = list(hooks), StepAgreement(run.host_group)
        for hook in hooks:
            hook.on_start(run)
        for _ in range(steps):
            train_step(run)
        observation.close()
        slices.close()
        if writer is None:
            return {}
        writer.close()
        share = json.loads(writer.path.read_text(encoding="utf-8").splitlines()[-1])["sdc/cost_share"]
        return {"cadence": detection.budget.cadence, "share": share}

    def _linking_step(self, clock: Clock) -> float:
        """The second of two steps in a row: what the first leaves is what it compares."""
        detection = self._build(self._changed(CHAIN))  # anew, since steps without it have changed the state
        chain = detection.chain
        assert chain is not None, "the section asks for it"
        chain.on_start(self._run)
        self.engine.step_control.pop_used()  # what steps without it have used
        wall_s = 0.0
        for one in (Clock(), clock):
            hooks: list[Any] = [Timed(hook, one) for hook in (detection, chain, chain.sums)]
            self.engine.hooks = [Meeting(), *hooks]
            self._batches.begin(None)
            self.engine.agreement = TimedAgreement(one, self._run.host_group)
            wall_s = self._wall(*hooks)
        detection.close()
        self.engine.step_control.record(on=False)
        return wall_s

    def _detecting_step(self, name: str, clock: Clock) -> float:
        detection = self._detections[name]
        hook: Any = Timed(detection, clock)
        self.engine.hooks += [hook, TimedReplays(clock)]
        for more in (detection.rows, detection.tokens):
            if more is not None:
                timed: Any = Timed(more, clock)
                self.engine.hooks.append(timed)
        attaching = Clock()
        observer = attaching.timed("attach", self._observe, detection)
        wall_s = self._wall(hook)
        if observer is not None:
            attaching.timed("attach", observer.close)
            clock.parts |= observer.parts
        if name not in (AUDIT, PERMUTED):
            return wall_s
        clock.parts |= attaching.parts
        return wall_s + attaching.parts["attach"]

    def _wall(self, *hooks: Any) -> float:
        """Seconds of a step, from before it is decided what is checked until it is judged."""
        dist.barrier()
        wait_for_device()
        began = time.perf_counter()
        for hook in hooks:
            hook.before_step(self._run)
        result = self.engine.train_step(self._batches)
        self._run.progress.step = result.step
        for hook in hooks:
            hook.after_step(self._run, result)
        wait_for_device()
        return time.perf_counter() - began

    def _observe(self, detection: StepChecker) -> PhaseObserver | None:
        """Attach what this step needs, as ``ObserverSwitch`` does."""
        step = self.engine.step_number
        wanting = [watch for watch in watches_of(detection) if watch.wanted(step)]
        names = {name for watch in wanting for name in watch.wanted(step)}
        if not names:
            return None
        chosen = [one for one in self._submodules if one.fqn in names]
        gradients = any(watch.gradients for watch in wanting)
        listeners = [watch.listener for watch in wanting if not watch.replays]
        of_replays = [watch.listener for watch in wanting if watch.replays]
        return PhaseObserver(self.engine, chosen, listeners, gradients, of_replays=of_replays)

    @contextmanager
    def _slicing(self, clock: Clock) -> Iterator[Any]:
        """The checks of slices for one step; what their hook in the optimizer copies is not measured."""
        slices = self._detections[SLICES].slices
        assert slices is not None, "the section asks for it"
        slices.on_start(self._run)
        before: Any = Timed(slices, clock)
        found: Any = Timed(slices.found, clock)
        unclipped: Any = Timed(slices.unclipped, clock)
        self.engine.hooks = [before, *self.engine.hooks, found, unclipped]
        try:
            yield before
        finally:
            slices.close()

    def close(self) -> None:
        """Give back signal handlers and files."""
        self._signals.close()
        self._run.events.close()


def measure_rank(messages: Messages, options: TrainBenchOptions, folder: Path, kept: int) -> None:
    """Report what steps of each kind took, and after each block the rates; then what ``kept`` steps in a row did."""
    rank = OverheadRank(options, folder, kept)

    def send_rates() -> None:
        messages.send(rates=measure_rates(rank.engine))

    take_turns(messages, f"blocks, H={options.hidden}", STEPS, options.blocks, rank.step, send_rates)
    messages.send(kept=rank.run_with_budget(kept))
    rank.close()
