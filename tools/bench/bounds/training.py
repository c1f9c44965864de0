"""Effect of gradient bounds on training, ``python -m tools.bench bound-training``: a campaign of small runs.

Each setting - no bound, absolute and spike-aware thresholds - trains the same small GPT with every seed, healthy and
with faults on one replica's gradient. Source: Pei, Lausen, Karypis, IEEE Micro 2025, 10.1109/MM.2025.3642709, whose
table the result follows; the faults there are those of unhealthy nodes, here they are injected.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from megasdc.common.errors import NonFiniteError
from megasdc.config.faults import COLLECTIVE
from megasdc.config.hooks import BOUNDS
from megasdc.data.manifest import DataManifest
from megasdc.metrics.writer import read_metrics
from megasdc.parallel.collectives import gather_objects
from megasdc.train.main import train
from tools.bench.bounds.gradient_sizes import GradientSizes
from tools.bench.bounds.options import FALL, GRACE_STEPS, SHARES, BoundTrainOptions, Setting
from tools.bench.bounds.training_scores import EPSILON, BoundRun, SettingScore, score
from tools.bench.bounds.training_verdict import percent, verdict
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, ignore_progress, join_ranks, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, Told, listing
from tools.bench.small.gpt import prepare_library, small_config
from tools.bench.small.runs import build_run

REPLICAS = 2
HARMED_REPLICA = 1
HARMED_ELEMENTS = 2


def run_config(
    options: BoundTrainOptions, data: Path, folder: Path, setting: Setting, seed: int, *, faulty: bool
) -> dict[str, Any]:
    """The configuration of one run; the seed is of weights and faults, which a faulty run has on one replica."""
    raw = small_config(
        options.gpt,
        folder,
        options.steps,
        {
            "optimizer_hooks": [] if setting.theta is None else [{"hook": setting.bound, "theta": setting.theta}],
            "faults": fault_specs(options, seed) if faulty else [],
        },
        training={"seed": seed, "eval_interval": options.steps, "eval_samples": options.eval_samples},
        learning_rate=options.learning_rate,
        data=data,
    )
    return raw | ({"bf16": {"enabled": True}} if options.precision == "bf16" else {})


def fault_specs(options: BoundTrainOptions, seed: int) -> list[dict[str, Any]]:
    """Heavy-tailed faults on the gradient that one replica gives to the sum: factors of +-10 to +-10^12.

    Both signs, because a wrong element that keeps its sign points downhill once it is bounded.
    """
    return [
        {
            "phase": COLLECTIVE,
            "replica": HARMED_REPLICA,
            "kind": "scale",
            "factor": sign * 10.0**decade,
            "elements": HARMED_ELEMENTS,
            "probability": probability,
            "seed": seed,
        }
        for decade, probability in options.fault_probabilities.items()
        for sign in (1, -1)
    ]


RUNS = "runs"
MEASURED_INTERVAL = 5
"""Steps from one healthy gradient whose elements are counted to the next."""


@dataclass(frozen=True)
class BoundTrainResult(Result):
    """All runs of a campaign.

    ``diverged_above`` is the entropy of token frequencies in nats, above which a finite loss counts as diverged;
    ``healthy_sizes`` holds, by kind of bound, what ``SHARES`` of the elements of healthy gradients exceed.
    """

    also = ("verdict", "epsilon", "fault_probabilities", "shares_of_healthy_elements", "scores")
    epsilon = EPSILON
    shares_of_healthy_elements = SHARES

    diverged_above: float
    healthy_sizes: dict[str, dict[str, float]]
    runs: Sequence[BoundRun] = field(repr=False)

    @property
    def fault_probabilities(self) -> dict[int, float]:
        """Of the options."""
        found: dict[int, float] = self.options.fault_probabilities
        return found

    @property
    def scores(self) -> list[SettingScore]:
        """Scores of each setting."""
        return score(self.runs, self.diverged_above)

    @property
    def verdict(self) -> str:
        """The conclusion from these numbers, as one sentence."""
        return verdict(self.scores, self.options.seeds)

    def report(self) -> Report:
        """The table of Pei et al., with prices and spreads, and one sentence."""
        options = self.options
        yield (
            f"GPT H={options.hidden} L={options.layers} S={options.sequence}, DP{REPLICAS}, {options.precision}, "
            f"{options.steps} steps of {REPLICAS * options.micro_batch} samples, learning rate "
            f"{options.learning_rate:g}, clipped at norm 1, {options.seeds} seeds, "
            f"{fmean(run.seconds for run in self.runs):.1f} s a run; a model that knows only token frequencies has a "
            f"loss of {self.diverged_above:.3f}"
        )
        yield (
            f"faults: on one replica's gradient of each parameter and step, +-10 on {HARMED_ELEMENTS} elements with "
            f"probability {options.fault_probability:g} for each sign, each decade up to 10^12 {FALL:g} times as "
            f"often; {fmean(run.faults for run in self.runs if run.faulty):.0f} a run"
        )
        yield listing("final validation loss", _columns(options.seeds), self.scores)
        chosen = ", ".join(f"{name} {share:g}" for name, share in SHARES.items())
        yield (
            "price: healthy with the bound over healthy without, mean; worst: over the healthy run of the same seed "
            "and bound; over no bound: over the one without; worse: increase above "
            f"{100 * EPSILON:g} %; diverged: final loss above that of token frequencies; NaN: no finite loss, or only "
            "skipped steps; both are left out of the losses; skipped steps and share of elements bounded: healthy, "
            "with faults. Thresholds, where not given: this share of the elements of the healthy gradients without a "
            f"bound, all seeds, exceeds them: {chosen}"
        )
        yield self.verdict


def _columns(seeds: int) -> Told:
    return {
        "setting": lambda one: one.setting.name.replace(" ", "\n", 1),
        "healthy\n(min-max)": _healthy,
        "price": lambda one: percent(one.price),
        "with faults\n(min-max)": lambda one: _spread(one.faulty),
        "worst": lambda one: "-" if one.worst is None else f"{one.worst:.4f}\n({percent(one.increase)})",
        "over no\nbound": lambda one: percent(one.over_unbounded),
        "worse\ncases": lambda one: f"{one.worse} of {seeds}",
        "diverged\n/ NaN": lambda one: f"{one.diverged} / {one.not_finite}",
        "skipped": lambda one: f"{one.skipped_healthy}\n{one.skipped}",
        "bounded": _shares,
    }


def _healthy(one: SettingScore) -> str:
    return _spread(one.healthy) + (f"\n{one.failed_healthy} failed" if one.failed_healthy else "")


def _shares(one: SettingScore) -> str:
    shares = [f"{100 * share:.2g} %" for share in (one.share_healthy, one.share) if share is not None]
    return "\n".join(shares) or "-"


def _spread(losses: Sequence[float]) -> str:
    return f"{fmean(losses):.4f}\n({min(losses):.4f}-{max(losses):.4f})" if losses else "-"


def bench_bound_training(options: BoundTrainOptions, on_progress: Progress = ignore_progress) -> BoundTrainResult:
    """Run a campaign with both ranks on this machine.

    Raises:
        MegasdcError: the data cannot be used, or a rank failed.
    """
    machine = describe_machine()
    with scratch_folder() as folder:
        data = options.data
        if data is None:
            on_progress("text of the standard library", 0, 1)
            data = prepare_library(folder / "data", options.vocab)
            on_progress("text of the standard library", 1, 1)
        entropy = DataManifest.load(data).unigram_entropy_nats
        arguments = {"options": options, "data": data, "folder": folder}
        found = run_in_ranks(run_campaign, arguments, REPLICAS, folder, on_progress=on_progress)
    (sizes,) = (one["sizes"] for one in found if "sizes" in one)
    return BoundTrainResult(machine, options, entropy, sizes, [one["run"] for one in found if "run" in one])


def run_campaign(messages: Messages, options: BoundTrainOptions, data: Path, folder: Path) -> None:
    """Make all runs as a rank; the healthy ones without a bound come first, since thresholds are chosen by them."""
    dims = join_ranks()
    sizes = GradientSizes(GRACE_STEPS + 1, MEASURED_INTERVAL)
    numbers = iter(range(1, options.num_runs + 1))

    def make(setting: Setting, seed: int, *, faulty: bool, measured: bool = False) -> None:
        """Train once from new weights, evaluate, and send what came out."""
        start = time.monotonic()
        number = next(numbers)
        config = run_config(options, data, folder / f"run_{number}", setting, seed, faulty=faulty)
        run, injector = build_run(config, dims)
        if measured:
            run.hooks.insert(0, sizes)
        try:
            train(run)
        except NonFiniteError:
            run.end.results.clear()  # all ranks end a run that only skips steps; it has no loss
        finally:
            run.events.close()
        own = 0 if injector is None else sum(firing.changed > 0 for firing in injector.firings)
        rows = read_metrics(run.folder) if dims.rank == 0 else []
        shares = [row["bounds/share"] for row in rows if "bounds/share" in row]
        found = BoundRun(
            setting=setting,
            seed=seed,
            faulty=faulty,
            loss=run.end.results.get("eval/loss", math.nan),
            steps=run.step,
            skipped=run.progress.skipped_steps,
            share=shares[-1] if shares else None,
            faults=sum(gather_objects(own)),
            seconds=time.monotonic() - start,
        )
        messages.send(run=found)
        messages.progress(RUNS, number, options.num_runs)
        del run
        gc.collect()  # an engine and its hooks hold each other

    seeds = range(1, options.seeds + 1)
    for seed in seeds:
        make(Setting(), seed, faulty=False, measured=True)
    sizes.reduce()
    quantiles = {kind: {name: sizes.of[kind].exceeded_by(share) for name, share in SHARES.items()} for kind in BOUNDS}
    messages.send(sizes=quantiles)
    for seed in seeds:
        make(Setting(), seed, faulty=True)
    for setting in _settings(options, quantiles):
        for faulty in (False, True):
            for seed in seeds:
                make(setting, seed, faulty=faulty)


def _settings(options: BoundTrainOptions, quantiles: dict[str, dict[str, float]]) -> list[Setting]:
    """All bounds, with the thresholds that were given or those that healthy gradients suggest."""
    found = []
    for kind, suggested in quantiles.items():
        given = options.thetas(kind)
        chosen = suggested.items() if given is None else [("", theta) for theta in given]
        found += [Setting(kind, theta, name) for name, theta in chosen]
    return found
