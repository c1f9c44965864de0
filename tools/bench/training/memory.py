"""Predicted against measured peak memory of a step: ``python -m tools.bench memory``.

Each configuration is trained for three steps; the peak of the third on each pipeline stage is compared with what
`check-config` predicts. On a CPU the peak is summed from the allocator's events of torch.profiler; on a GPU it is
``torch.cuda.max_memory_allocated``, though the prediction is for a CPU's modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasdc.config.checks import BatchLayout, check_layout
from megasdc.config.load import RunConfig, parse_config
from megasdc.parallel import groups
from megasdc.parallel.collectives import gather_objects
from megasdc.train.memory import MIB, predict_step_memory, unpredicted_because
from megasdc.train.process import prepare_cpu
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, ignore_progress, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, table
from tools.trainings.step_memory import CASES, measure_peak, trains_on_gpu

BAR = 0.1
"""Largest relative error of a prediction."""


@dataclass(frozen=True)
class StagePeak:
    """Peak bytes of one stage of a configuration, predicted and measured: the largest over the stage's ranks.

    ``unpredicted`` is the setting because of which nothing is predicted, or None.
    """

    also = ("error",)

    name: str
    ranks: int
    stage: int
    predicted: float | None
    unpredicted: str | None
    measured: float

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return None if self.predicted is None else self.predicted / self.measured - 1


@dataclass(frozen=True)
class MemoryResult(Result):
    """Peaks of the stages of all configurations."""

    also = ("passed", "bar")
    bar = BAR

    stages: Sequence[StagePeak]

    @property
    def passed(self) -> bool:
        """Whether something was predicted, and every prediction is within the bar."""
        errors = [stage.error for stage in self.stages if stage.error is not None]
        return bool(errors) and all(abs(error) <= BAR for error in errors)

    def report(self) -> Report:
        """A row for each stage of each configuration."""
        rows = []
        for one in self.stages:
            told = "-" if one.predicted is None else f"{one.predicted / MIB:,.1f}"
            last = f"not predicted: {one.unpredicted}" if one.error is None else f"{one.error:+.1%}"
            rows.append([one.name, str(one.ranks), str(one.stage), told, f"{one.measured / MIB:,.1f}", last])
        columns = ("configuration", "ranks", "stage", "predicted MiB", "measured MiB", "error")
        yield table(f"peak memory of a step; bar {BAR:.0%}", columns, rows)


def compare_memory(
    name: str, config: RunConfig, layout: BatchLayout, vocab: int, peaks: Mapping[int, float], on_gpu: bool
) -> list[StagePeak]:
    """Measured peaks, the largest bytes by stage, beside predicted ones."""
    because = unpredicted_because(config)
    predicted = [] if because else predict_step_memory(config, layout, vocab, on_gpu)
    totals = {stage: one.total for stage, one in enumerate(predicted)}
    return [
        StagePeak(name, layout.world_size, stage, totals.get(stage), because, peak)
        for stage, peak in sorted(peaks.items())
    ]


def bench_memory(
    cases: Mapping[str, tuple[RunConfig, int, int]], on_progress: Progress = ignore_progress
) -> MemoryResult:
    """Train each configuration for some steps with all ranks on this machine.

    Args:
        cases: configuration, ranks and entries of the vocabulary, by name.

    Raises:
        MegasdcError: a layout does not fit, or a rank failed.
    """
    stages: list[StagePeak] = []
    for name, (config, ranks, vocab) in cases.items():
        layout = check_layout(config, ranks)
        on_progress(name, 0, 1)
        peaks: dict[int, float] = {}
        with scratch_folder() as folder:
            arguments = {"config": config.resolved(), "source": config.source, "vocab": vocab}
            (found,) = run_in_ranks(measure_rank, arguments, ranks, folder)
        for stage, peak in found["peaks"]:
            peaks[stage] = max(peaks.get(stage, 0), peak)
        stages += compare_memory(name, config, layout, vocab, peaks, found["on_gpu"])
        on_progress(name, 1, 1)
    return MemoryResult(describe_machine(), {"configurations": list(cases)}, stages)


def default_cases(devices: int = 0) -> dict[str, tuple[RunConfig, int, int]]:
    """``CASES`` as ``bench_memory`` takes them, on so many GPUs of this host; 0: on its processor."""
    return {name: (case.config(devices), case.ranks, case.vocab) for name, case in CASES.items()}


def measure_rank(messages: Messages, config: dict[str, Any], source: str, vocab: int) -> None:
    """Train as a rank, and report the peaks of all ranks; the configuration is the resolved one."""
    parsed = parse_config(config, source=source)
    prepare_cpu(1)
    parallel = parsed.megasdc.parallel
    groups.init_process_group(parallel.timeout_s, share_devices=parallel.share_devices)
    messages.send(peaks=gather_objects(measure_peak(parsed, vocab)), on_gpu=trains_on_gpu())
