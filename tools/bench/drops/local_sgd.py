"""Synchronous training and Local-SGD, each with and without DropCompute, ``python -m tools.bench local-sgd``.

Real launches on this machine. Delays are injected as the same functions of step, replica and micro-batch in all four,
so that the times that the synchronous run has recorded also say what the others should need: a round is then a step of
as many micro-batches as its steps have, and the threshold is searched in it as in a run. What is not delay or waiting
is measured where it is paid: the time between synchronous steps, which sum gradients over all replicas, and between
local ones, which do not; and that of an exchange, the least that any replica has waited in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.common.errors import DataError
from megasdc.dropcompute.threshold import search_recorded
from megasdc.events import read_events
from megasdc.lab.report.step_times import StepTimesOfRun, load_step_times
from megasdc.localsgd.rounds import Round, read_rounds
from megasdc.metrics.writer import read_metrics
from tools.bench.drops.options import LocalSgdOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Report, Result, Told, listing, verdict
from tools.bench.small.gpt import prepare_library, small_config

TOLERANCE = 0.05
"""Largest difference of a measured speed from the predicted one, as a share of that."""
WINDOW_STEPS, WINDOW_ROUNDS, LEFT_OUT = 20, 4, 2
"""Steps and rounds from which thresholds are chosen, and first steps or rounds that are not counted."""
_EXCHANGE = "local_sgd/exchange_s"
SYNC, SYNC_DROP, LOCAL, LOCAL_DROP = "synchronous", "synchronous, drops", "Local-SGD", "Local-SGD, drops"


@dataclass(frozen=True)
class Mode:
    """One way to train, as it went.

    Args:
        speed: micro-batches per second, over all replicas, once thresholds were chosen.
        predicted: the same from the times of the synchronous run; None: it is that run.
        dropped: share of the planned micro-batches that was dropped in that time.
        tokens: used in all.
        losses: training loss in nats by tokens used until then.
        eval_loss: of the end.
        fetched: bytes that a rank has fetched in a round; 0: none.
    """

    name: str
    speed: float
    predicted: float | None
    dropped: float
    tokens: int
    losses: Sequence[tuple[int, float]] = field(repr=False)
    eval_loss: float
    fetched: int = 0

    @property
    def off(self) -> float:
        """Measured over predicted speed, less 1."""
        return 0.0 if self.predicted is None else self.speed / self.predicted - 1

    @property
    def passed(self) -> bool:
        """Whether the prediction holds."""
        return abs(self.off) <= TOLERANCE

    def loss_at(self, tokens: int) -> float:
        """Training loss at a number of tokens, between the lines before and after it."""
        used, losses = zip(*self.losses, strict=True)
        return float(np.interp(tokens, used, losses))


@dataclass(frozen=True)
class LocalSgdResult(Result):
    """All four ways."""

    judged = ("modes",)
    modes: Sequence[Mode]

    def report(self) -> Report:
        """Speeds, bytes and losses."""
        options, plain, least = self.options, self.modes[0].speed, min(one.tokens for one in self.modes)
        yield (
            f"{options.gpt}; {options.replicas} replicas, one slower by {options.straggler:g} of a micro-batch; "
            f"a micro-batch sleeps {options.latency_s:g} s and a bounded log-normal delay of half of that in the mean; "
            f"rounds of {options.every} local steps"
        )
        columns: Told = {
            "training": lambda one: one.name,
            "micro-batches / s": lambda one: f"{one.speed:.1f}",
            "over synchronous": lambda one: f"{one.speed / plain:.3f}",
            "predicted": lambda one: "-" if one.predicted is None else f"{one.predicted / plain:.3f}",
            "off": lambda one: f"{100 * one.off:+.1f} %",
            "dropped": lambda one: f"{100 * one.dropped:.1f} %",
            "bytes a round": lambda one: f"{one.fetched:,}" if one.fetched else "-",
            f"loss at {least:,} tokens": lambda one: f"{one.loss_at(least):.3f}",
            "final validation loss": lambda one: f"{one.eval_loss:.3f}",
            "verdict": lambda one: verdict(one.passed),
        }
        yield listing("speed with a straggler and a tail", columns, self.modes)


def bench_local_sgd(options: LocalSgdOptions, on_progress: Progress = ignore_progress) -> LocalSgdResult:
    """Train in all four ways.

    Raises:
        DataError: a launch has failed.
    """
    machine = describe_machine()
    with scratch_folder() as folder:
        data = prepare_library(folder / "data", options.gpt.vocab, "[a-d]*.py")
        runs = {}
        for number, name in enumerate((SYNC, SYNC_DROP, LOCAL, LOCAL_DROP)):
            on_progress(name, number, 4)
            runs[name] = _launch(options, folder / f"run_{number}", data, name)
        sync = _Synchronous(options, runs[SYNC])
        modes = [
            sync.mode(SYNC, None),
            _Synchronous(options, runs[SYNC_DROP]).mode(SYNC_DROP, sync.predict_drops()),
        ]
        local = _Local(options, runs[LOCAL])
        costs = local.exchange_s, local.between_s
        modes.append(local.mode(LOCAL, sync.predict_local(*costs, drops=False)))
        modes.append(_Local(options, runs[LOCAL_DROP]).mode(LOCAL_DROP, sync.predict_local(*costs, drops=True)))
    return LocalSgdResult(machine, options, modes)


def _launch(options: LocalSgdOptions, folder: Path, data: Path, name: str) -> Path:
    """Train in one way; returns the run folder."""
    apart, drops = name in (LOCAL, LOCAL_DROP), name in (SYNC_DROP, LOCAL_DROP)
    delay = [
        {"kind": "normal", "mean_s": options.latency_s, "std_s": 0.05 * options.latency_s},
        {"kind": "bounded_lognormal", "mean_s": 0.5, "micro_batch_latency_s": options.latency_s},
        {"kind": "slow_rank", "replica": options.replicas - 1, "delay_s": options.straggler * options.latency_s},
    ]
    drop = {"enabled": True, "threshold": "auto" if drops else "inf", "warmup_steps": LEFT_OUT}
    sections: dict[str, Any] = {"delay": delay, "determinism": {"enabled": True}}
    if apart:
        threshold = "auto" if drops else "inf"
        own = {"replicas": options.replicas, "every": options.every, "threshold": threshold}
        sections["local_sgd"] = own | ({"window_rounds": WINDOW_ROUNDS} if drops else {})
    if not apart or not drops:  # its times are recorded
        sections["drop_compute"] = drop | {"window_steps": WINDOW_STEPS, "gradients": "computed"}
    steps = options.rounds * options.every
    training = {"eval_interval": steps, "eval_samples": 256}
    config = small_config(
        options.gpt, folder, steps, sections, training=training, learning_rate=options.learning_rate, data=data
    )
    config["megasdc"]["logging"] |= {"interval": options.every, "run_dir": str(folder)}
    folder.mkdir()
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config), encoding="utf-8")
    ranks = (
        ["--replicas", str(options.replicas), "--num-ranks", "1"] if apart else ["--num-ranks", str(options.replicas)]
    )
    command = [sys.executable, "-m", "megasdc", "launch", "--config", str(path), *ranks]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(f"{name}: {' '.join(command)} has ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return folder


class _Synchronous:
    """A synchronous run: its times, and what they predict."""

    def __init__(self, options: LocalSgdOptions, folder: Path) -> None:
        self._options = options
        rows = read_metrics(folder)
        self._rows = [row for row in rows if "train/loss" in row]
        self._eval_loss = next(row["eval/loss"] for row in reversed(rows) if "eval/loss" in row)
        chosen = [one.step or 0 for one in read_events(folder, kind="drop", name="threshold")]
        self._first = max([LEFT_OUT, *chosen]) + 1
        self.times: StepTimesOfRun = load_step_times(folder)

    def _counted(self) -> NDArray[np.bool_]:
        """Whole windows of lines after the thresholds were chosen, [step]."""
        start = next(row["step"] for row in self._rows if row["step"] >= self._first - 1)
        return self.times.steps > start

    @property
    def step_s(self) -> float:
        """Mean seconds from one step to the next, of those that count."""
        start = next(row for row in self._rows if row["step"] >= self._first - 1)
        last = self._rows[-1]
        evaluated = last["step"] == self._options.rounds * self._options.every
        last = self._rows[-2] if evaluated else last
        return float(last["monotonic"] - start["monotonic"]) / (last["step"] - start["step"])

    def mode(self, name: str, predicted: float | None) -> Mode:
        """How it went."""
        done, options = self.times.completed[:, self._counted()], self._options
        losses = [(row["train/tokens"], row["train/loss"]) for row in self._rows]
        planned = options.replicas * options.gpt.micro_batches
        mean = done.sum(axis=0).mean()
        return Mode(name, mean / self.step_s, predicted, 1 - mean / planned, losses[-1][0], losses, self._eval_loss)

    @property
    def _ends(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Starts and ends, [replica, step, micro-batch], after the first steps."""
        kept = self.times.steps > LEFT_OUT
        return self.times.start_s[:, 0, kept], self.times.end_s[:, 0, kept]

    @property
    def _between_s(self) -> float:
        """Mean seconds of a step in which no micro-batch is computed or waited for."""
        return self.step_s - float(self._ends[1][:, :, -1].max(axis=0).mean())

    def predict_drops(self) -> float:
        """Micro-batches per second with the threshold that is best for these times."""
        starts, ends = self._ends
        found = search_recorded(starts, ends, self._between_s, 0.1)
        return found.speedup * starts.shape[0] * starts.shape[2] / self.step_s

    def predict_local(self, exchange_s: float, between_s: float, *, drops: bool) -> float:
        """Micro-batches per second of Local-SGD.

        Args:
            exchange_s: seconds of an exchange.
            between_s: seconds of a local step in which no micro-batch is computed.
        """
        starts, ends = self._ends
        replicas, steps, micro_batches = ends.shape
        rounds, every = steps // self._options.every, self._options.every
        own = ends[:, :, -1] + between_s
        begins = np.concatenate(
            [np.zeros((replicas, rounds, 1)), self._in_rounds(own).cumsum(axis=2)[:, :, :-1]], axis=2
        )
        of_round = [
            (self._in_rounds(one) + begins[..., None]).reshape(replicas, rounds, every * micro_batches)
            for one in (starts, ends)
        ]
        whole = self._in_rounds(own).sum(axis=2).max(axis=0).mean() + exchange_s
        speed = float(replicas * every * micro_batches / whole)
        if not drops:
            return speed
        rest = exchange_s + between_s
        return speed * search_recorded(of_round[0], of_round[1], rest, 0.1).speedup

    def _in_rounds(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[replica, step, ...] as [replica, round, step, ...], whole rounds alone."""
        every = self._options.every
        rounds = values.shape[1] // every
        return values[:, : rounds * every].reshape(values.shape[0], rounds, every, *values.shape[2:])


class _Local:
    """A run of replicas that train apart."""

    def __init__(self, options: LocalSgdOptions, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._rounds: list[Round] = list(read_rounds(folder / "rounds.jsonl").values())
        self._replicas = [folder / f"replica_{number}" for number in range(options.replicas)]
        self._rows = [{row["step"]: row for row in read_metrics(one) if "train/loss" in row} for one in self._replicas]

    @property
    def exchange_s(self) -> float:
        """Median over rounds of the least seconds that any replica has spent in the exchange."""
        waited: dict[int, list[float]] = {}
        for folder in self._replicas:
            for row in read_metrics(folder):
                if _EXCHANGE in row:
                    waited.setdefault(row["step"], []).append(row[_EXCHANGE])
        return median(min(some) for some in waited.values())

    @property
    def between_s(self) -> float:
        """Mean seconds of a local step in which no micro-batch is computed, after the first rounds."""
        found = list[float]()
        for folder in self._replicas:
            lines = [row for row in read_metrics(folder) if "train/loss" in row][LEFT_OUT - 1 : -1]
            waited = {row["step"]: row[_EXCHANGE] for row in read_metrics(folder) if _EXCHANGE in row}
            times = load_step_times(folder)
            first, last = lines[0]["step"], lines[-1]["step"]
            kept = (times.steps > first) & (times.steps <= last)
            exchanged = sum(waited[row["step"]] for row in lines[1:])
            seconds = lines[-1]["monotonic"] - lines[0]["monotonic"] - exchanged
            found.append(seconds / (last - first) - float(times.end_s[0, 0, kept, -1].mean()))
        return fmean(found)

    def mode(self, name: str, predicted: float) -> Mode:
        """How it went; the last round, after which is evaluated, counts as the others."""
        options, skipped = self._options, LEFT_OUT + (WINDOW_ROUNDS if name == LOCAL_DROP else 0)
        counted = self._rounds[skipped:]
        done = sum(sum(one.micro_batches.values()) for one in counted)
        planned = len(counted) * options.replicas * options.every * options.gpt.micro_batches
        tokens, losses = 0, []
        for one in self._rounds:
            tokens += sum(one.tokens.values())
            step = one.round * options.every
            losses.append((tokens, fmean(rows[step]["train/loss"] for rows in self._rows if step in rows)))
        evals = [row["eval/loss"] for row in read_metrics(self._replicas[0]) if "eval/loss" in row]
        (fetched, *_) = (
            one.fields["fetched"] for one in read_events(self._replicas[0], kind="local_sgd", name="round")
        )
        seconds = sum(one.seconds for one in counted)
        return Mode(name, done / seconds, predicted, 1 - done / planned, tokens, losses, evals[-1], fetched)
