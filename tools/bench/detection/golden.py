"""Campaign of injected faults against a golden trace: which are found, and which rank is named.

Random faults - kinds x submodules x phases x ranks - are injected one a run, in several layouts and types. Each run is
compared with a golden trace of the same ranks as ``megasdc golden verify`` compares, and scored against what the
injector says it did. Clean runs in between must raise nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasdc.errors import ConfigError
from megasdc.parallel.run_ranks import run_ranks
from tools.bench.machine import describe_machine
from tools.bench.result import Progress

LAYOUTS = ((1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2))
"""(tensor, pipeline, data)."""
PRECISIONS = ("fp32", "bf16")
STYLES = {"fp32": "gpt", "bf16": "llama"}
"""Each type trains another style of model, so that both are in the campaign."""


@dataclass(frozen=True)
class DetectionOptions:
    """Size of a campaign.

    Args:
        faults: how many are injected, over all layouts and types; rounded up to equal shares.
        clean: runs without a fault, likewise.
        layouts: (tensor, pipeline, data) of each.
        precisions: some of ``PRECISIONS``.
        seed: of every draw.
        fuse: whether the models have ``model.fuse``.
    """

    faults: int = 600
    clean: int = 120
    layouts: tuple[tuple[int, int, int], ...] = LAYOUTS
    precisions: tuple[str, ...] = PRECISIONS
    seed: int = 1
    fuse: bool = False

    @property
    def cells(self) -> list[tuple[tuple[int, int, int], str]]:
        """Every layout with every type."""
        return [(layout, precision) for layout in self.layouts for precision in self.precisions]


@dataclass(frozen=True)
class Trial:
    """One run with one fault, or with none.

    Args:
        layout: tensor x pipeline x data.
        precision: type of the parameters.
        phase: that was harmed; None in a clean run.
        kind: of the fault.
        rank: that was harmed.
        address: what was harmed.
        changed: elements whose bits changed.
        effect: whether the fault had any; false where a parameter, master or moment of no rank ended with other bits
            after a fault in a stored state, which the very next update overwrites.
        named: ranks called divergent.
        suspects: ranks of which one is wrong, without saying which.
        first: the first difference of the first of these.
        rank_right: exactly the harmed rank was named.
        submodule_right: the first difference is in the harmed submodule.
        direction_right: and in the phase in which the harm shows first.
    """

    layout: str
    precision: str
    phase: str | None
    kind: str
    rank: int
    address: str
    changed: int
    effect: bool
    named: tuple[int, ...]
    suspects: tuple[int, ...]
    first: str
    rank_right: bool
    submodule_right: bool
    direction_right: bool

    @property
    def detected(self) -> bool:
        """Whether anything was found to be wrong."""
        return bool(self.named or self.suspects)


@dataclass(frozen=True)
class DetectionResult:
    """All trials of a campaign.

    Args:
        machine: date, processor, versions.
        options: size.
        trials: with faults and clean.
    """

    machine: dict[str, Any]
    options: DetectionOptions
    trials: Sequence[Trial] = field(repr=False)

    @property
    def harmful(self) -> list[Trial]:
        """Trials whose fault changed a bit of something that was used or kept."""
        return [trial for trial in self.trials if trial.phase is not None and trial.changed and trial.effect]

    @property
    def clean(self) -> list[Trial]:
        """Runs without a fault."""
        return [trial for trial in self.trials if trial.phase is None]

    @property
    def passed(self) -> bool:
        """Every harmful fault detected and named rightly, nothing else called divergent, and something tested."""
        right = all(t.rank_right and t.submodule_right and t.direction_right for t in self.harmful)
        without = [trial for trial in self.trials if trial not in self.harmful]
        return right and bool(self.harmful) and not any(trial.detected for trial in without)

    def counts(self, key: Callable[[Trial], str]) -> dict[str, Counter[str]]:
        """Counts of the trials with faults, grouped by what ``key`` says."""
        groups: dict[str, Counter[str]] = {}
        for trial in self.trials:
            if trial.phase is None:
                continue
            count = groups.setdefault(key(trial), Counter())
            count["injected"] += 1
            count["no bit changed"] += not trial.changed
            count["rounded away"] += bool(trial.changed) and not trial.effect
            if trial.changed and trial.effect:
                count["harmful"] += 1
                count["detected"] += trial.detected
                count["rank"] += trial.rank_right
                count["submodule"] += trial.submodule_right
                count["direction"] += trial.direction_right
        return groups

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it."""
        return {
            "passed": self.passed,
            "machine": self.machine,
            "options": asdict(self.options),
            "by_phase": self.counts(lambda trial: str(trial.phase)),
            "by_layout": self.counts(lambda trial: f"{trial.layout} {trial.precision}"),
            "by_kind": self.counts(lambda trial: trial.kind),
            "clean_runs": len(self.clean),
            "clean_alarms": sum(trial.detected for trial in self.clean),
            "trials": [asdict(trial) for trial in self.trials],
        }


def parse_layouts(text: str) -> tuple[tuple[int, int, int], ...]:
    """Read layouts such as ``1x1x2,2x1x1``.

    Raises:
        ConfigError: one is not three positive numbers.
    """
    found = []
    for part in text.split(","):
        numbers = part.strip().split("x")
        if len(numbers) != 3 or not all(number.isdecimal() and int(number) for number in numbers):
            raise ConfigError(f"--layouts: {part!r} is not tensor x pipeline x data, such as 2x1x2")
        tensor, pipeline, data = map(int, numbers)
        found.append((tensor, pipeline, data))
    return tuple(found)


def bench_detection(
    options: DetectionOptions, on_progress: Progress = lambda what, done, total: None
) -> DetectionResult:
    """Run a campaign with all ranks on this machine.

    Args:
        options: size.
        on_progress: see ``Progress``.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    share = -(-options.faults // len(options.cells))
    clean = -(-options.clean // len(options.cells))
    trials: list[Trial] = []
    for number, (layout, precision) in enumerate(options.cells):
        name = f"{'x'.join(map(str, layout))} {precision}"
        on_progress(name, 0, share + clean)
        with tempfile.TemporaryDirectory(prefix="megasdc_detection_") as scratch:
            request = {
                "layout": layout,
                "precision": precision,
                "style": STYLES[precision],
                "fuse": options.fuse,
                "faults": share,
                "clean": clean,
                "seed": options.seed * 1000 + number,
                "folder": scratch,
            }
            ranks = layout[0] * layout[1] * layout[2]
            run_ranks(
                "tools.bench.detection.golden_rank",
                request,
                ranks,
                1,
                Path(scratch),
                lambda message, name=name: on_progress(name, message["done"], share + clean),  # type: ignore[misc]
            )
            lines = (Path(scratch) / "trials.jsonl").read_text(encoding="utf-8").splitlines()
        for found in map(json.loads, lines):
            trials.append(Trial(**found | {name: tuple(found[name]) for name in ("named", "suspects")}))
    return DetectionResult(machine, options, trials)
