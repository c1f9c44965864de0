"""Repeatability of a configuration, ``megasdc check-determinism``: known causes, and two runs compared.

The two runs are ordinary training steps in fresh processes on this machine, with the same seeds, data and environment.
Equal runs prove nothing about rarer differences; unequal ones are named by the first thing that differs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.common.addresses import FORWARD
from megasdc.config.checks import BatchLayout, check_layout, replica_config, smallest_layout
from megasdc.config.environment import set_deterministic_environment
from megasdc.config.load import RunConfig
from megasdc.config.repeatability import DifferenceCause, find_causes, find_startup_modules
from megasdc.data.manifest import MANIFEST_FILE
from megasdc.output.outcome import Outcome
from megasdc.output.page import Page
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.run_ranks import run_ranks
from megasdc.sdc.trace import Trace, compare_traces, read_trace, trace_path

OBSERVED = "results of all submodules, gradients, losses, gradient norms, optimizer states and parameters"
HIDDEN = (
    "losses, gradient norms, optimizer states and parameters; results of submodules were not compared, because with "
    "this model.backend they cannot be observed"
)
RUNS_DIFFER = 1
CAUSES_FOUND = 3
"""Exit code of `check-determinism` when the runs agree, or were not made, and something was found."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FirstDifference:
    """First difference between two runs.

    Attributes:
        address: of the first result that differs in execution order, and its rank.
        first: its checksum in the first run; None if it was not made there.
        second: the same of the second run.
        different: number of results that differ.
        observations: number of results of the longer run.
    """

    address: str
    first: str | None
    second: str | None
    different: int
    observations: int

    def render(self) -> str:
        """The difference for people."""
        return (
            f"DIFFERENT, first at {self.address}: {self.first or 'absent'} and {self.second or 'absent'}; "
            f"{self.different} of {self.observations} results differ"
        )


def compare_two_runs(
    first: Mapping[int, Trace], second: Mapping[int, Trace], layout: ParallelDims
) -> FirstDifference | None:
    """Find the first result in which two runs differ, from their traces by rank; None if all results are equal."""
    found = compare_traces(first, second, layout)
    if not found.first:
        return None
    one = found.first[0]
    dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, one.rank)
    place = f"rank {one.rank} (dp {dims.dp_rank}, pp {dims.pp_rank}, tp {dims.tp_rank})"
    before, after = (None if value is None else f"{value:016x}" for value in (one.expected, one.got))
    return FirstDifference(f"{one.address}, {place}", before, after, len(found.divergences), found.compared)


def repeat_outcome(
    unset: Sequence[str], lines: Sequence[str], equal: str, difference: FirstDifference | None, **contents: Any
) -> Outcome[Any]:
    """What a check comes to: 1 where two runs differ, 3 where they do not, but something can make others differ.

    Args:
        unset: what can, in sentences.
        lines: what was done.
        equal: what was compared, where the runs agree; empty: none were made.
        difference: the first; None: there is none.
        contents: for JSON, beside the difference.
    """
    code = RUNS_DIFFER if difference is not None else CAUSES_FOUND if unset else 0
    if difference is not None or equal:
        lines = [*lines, f"equal: {equal}" if difference is None else difference.render()]
    first, *rest = [*(f"found: {cause}" for cause in unset), *lines]
    found = {**contents, "difference": None if difference is None else asdict(difference)}
    return Outcome(code, found, Page("Determinism", first, sentences=rest))


def check_determinism(
    config: RunConfig,
    *,
    ranks: int | None = None,
    steps: int = 3,
    lint_only: bool = False,
    on_progress: Progress = lambda what, done, total: None,
) -> Outcome[Any]:
    """List what could make two runs of a configuration differ, then make two short runs and compare them.

    The runs write nothing where the configuration says: no checkpoint, no events, no monitors. Of a study, they are of
    its trusted replica alone.

    Args:
        ranks: of each run; None: the smallest number that fits layout and batch sizes.
        steps: of each run.
        lint_only: make no run.
        on_progress: called with what is done, how much of it, and of how much.

    Raises:
        MegasdcError: the layout or the environment does not fit, or a rank failed; its class says what is wrong.
    """
    import torch

    if config.megasdc.study.mode is not None:
        config = replica_config(config, config.megasdc.study.trusted)
    causes = find_causes(config, os.environ, find_startup_modules(), torch.cuda.is_available())
    if lint_only:
        return _outcome(causes)
    set_deterministic_environment(config.megasdc.determinism, dict(os.environ))  # what each rank would refuse
    layout = smallest_layout(config) if ranks is None else check_layout(config, ranks)
    data = config.megasdc.data
    prepared = all((Path(folder) / MANIFEST_FILE).is_file() for folder in data.folders)
    runs = []
    for name in ("first run", "second run"):
        with tempfile.TemporaryDirectory(prefix="megasdc_repeat_") as scratch:
            runs.append(_run_once(config, layout, steps, prepared, Path(scratch), name, on_progress))
    difference = compare_two_runs(runs[0], runs[1], ParallelDims(layout.tensor, layout.pipeline, layout.data))
    told = f"prepared data in {', '.join(data.folders)}"
    if not prepared:
        told = (
            f"random tokens of a vocabulary of {data.tokenizer.vocab_size}, because {data.path} holds no prepared data"
        )
    observed = any(address.phase == FORWARD for trace in runs[0].values() for address in trace.addresses)
    return _outcome(causes, layout, steps, told, sum(map(len, runs[0].values())), observed, difference)


def _outcome(
    causes: Sequence[DifferenceCause],
    layout: BatchLayout | None = None,
    steps: int = 0,
    data: str = "",
    observations: int = 0,
    observed: bool = True,
    difference: FirstDifference | None = None,
) -> Outcome[Any]:
    lines, equal = [] if causes else ["no setting is known to make runs differ"], ""
    if layout is not None:
        lines.append(
            f"two runs of {steps} steps, TP {layout.tensor} x PP {layout.pipeline} x DP {layout.data}, on {data}"
        )
        equal = f"{observations} {OBSERVED if observed else HIDDEN}"
    return repeat_outcome(
        *([one.render() for one in causes], lines, equal, difference),
        causes=[asdict(one) for one in causes],
        layout=None if layout is None else asdict(layout),
        steps=steps,
        data=data,
        observations=observations,
        observed=observed,
    )


def _run_once(
    config: RunConfig, layout: BatchLayout, steps: int, prepared: bool, folder: Path, name: str, on_progress: Progress
) -> dict[int, Trace]:
    """Run the ranks once and return their traces."""
    threads = config.megasdc.parallel.threads or len(os.sched_getaffinity(0))
    request = {
        "config": _in_folder(config, folder, prepared),
        "source": config.source,
        "steps": steps,
        "prepared": prepared,
        "folder": str(folder),
    }
    on_progress(name, 0, steps)
    run_ranks(
        "megasdc.ops.determinism_check.rank",
        request,
        layout.world_size,
        threads,
        folder,
        lambda message: on_progress(name, message["done"], steps),
        fresh=True,
    )
    return {rank: read_trace(trace_path(folder, rank, 1))[1] for rank in range(layout.world_size)}


def _in_folder(config: RunConfig, folder: Path, prepared: bool) -> dict[str, Any]:
    """The configuration with everything that a run reads or writes beside its data moved into an empty folder.

    So checkpoints of a run that was made with it do not change where the check begins.
    """
    raw = config.in_folder(folder)
    sections = raw["megasdc"]
    sections["checkpoint"] |= {"universal": None, "universal_without": []}
    if not prepared:  # their vocabulary is that of the data that are missing
        sections["model"]["initial_weights"] = None
    return raw
