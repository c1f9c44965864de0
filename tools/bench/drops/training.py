"""Effect of dropped micro-batches on training, ``python -m tools.bench drop-training``: a campaign of small runs.

Each setting - shares left out, ways to make up for them - trains the same small GPT with every seed. The result is
shown as Table 1 of Giladi et al., NeurIPS 2023, arXiv 2306.10598, where BERT-Large ends at F1 91.32 with nothing left
out, 91.34, 91.44 and 91.19 with 2.5 to 3, 5.5 to 6 and 10 to 11 % left out.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasdc.data.prepare import prepare
from megasdc.errors import ConfigError, StorageError
from megasdc.parallel.run_ranks import run_ranks
from tools.bench.drops.training_scores import DropRun, SettingScore, score, verdict
from tools.bench.drops.training_setup import REPLICAS, DropTrainOptions, Setting, draw, prepared_section, run_config
from tools.bench.machine import describe_machine
from tools.bench.result import Progress


@dataclass(frozen=True)
class DropTrainResult:
    """All runs of a campaign.

    Args:
        machine: date, processor, versions.
        options: size.
        runs: one entry a run.
    """

    machine: dict[str, Any]
    options: DropTrainOptions
    runs: Sequence[DropRun] = field(repr=False)

    @property
    def scores(self) -> list[SettingScore]:
        """What came out for each setting."""
        return score(self.runs, self.options)

    @property
    def verdict(self) -> str:
        """What these numbers show, as one sentence."""
        return verdict(self.scores)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it."""
        return {
            "verdict": self.verdict,
            "machine": self.machine,
            "options": asdict(self.options),
            "scores": [asdict(one) | {"name": one.setting.name, "over_none": one.over_none} for one in self.scores],
            "runs": [asdict(run) for run in self.runs],
        }


class RunLog:
    """Keeps finished runs in a file, so that a campaign that was ended goes on where it was.

    Args:
        path: the file; None keeps them in memory.
        options: of the campaign.

    Raises:
        ConfigError: the file is of other options.
        StorageError: it cannot be read or written.
    """

    def __init__(self, path: Path | None, options: DropTrainOptions) -> None:
        self._path = path
        self.runs: list[DropRun] = []
        if path is None:
            return
        head, lines = json.loads(json.dumps(asdict(options))), []
        try:
            if path.exists() and path.stat().st_size:
                whole = [line for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
                found, *lines = [json.loads(line) for line in whole]
                if found != head:
                    raise ConfigError(f"--log: {path} has runs of other options, {found}; name another, or remove it")
            kept = "".join(json.dumps(line) + "\n" for line in (head, *lines))
            path.write_text(kept, encoding="utf-8")  # without a line that was not written whole
        except (OSError, ValueError) as error:
            raise StorageError(f"--log: {path} cannot be used ({error}); name another file, or remove it") from error
        self.runs = [DropRun(**{**line, "setting": Setting(**line["setting"])}) for line in lines]

    def add(self, run: DropRun) -> None:
        """Keep a run."""
        self.runs.append(run)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")


def bench_drop_training(
    options: DropTrainOptions, log: Path | None = None, on_progress: Progress = lambda what, done, total: None
) -> DropTrainResult:
    """Make the runs of a campaign that are not in its log yet, with both ranks on this machine.

    Args:
        options: size.
        log: file that keeps finished runs; None: none does.
        on_progress: see ``Progress``.

    Raises:
        MegasdcError: the log cannot be used, or a rank failed.
    """
    machine = describe_machine()
    kept = RunLog(log, options)
    made = {(run.setting, run.seed) for run in kept.runs}
    left = [one for one in options.runs if one not in made]
    if left:
        _train(options, left, kept, on_progress)
    return DropTrainResult(machine, options, kept.runs)


def _train(options: DropTrainOptions, left: Sequence[tuple[Setting, int]], kept: RunLog, on_progress: Progress) -> None:
    waiting = iter(left)

    def take(message: dict[str, Any]) -> None:
        setting, seed = next(waiting)
        kept.add(DropRun(setting=setting, seed=seed, **message))
        on_progress("runs", len(kept.runs), len(options.runs))

    with tempfile.TemporaryDirectory(prefix="megasdc_drops_") as scratch:
        folder = Path(scratch)
        on_progress("text of the standard library", 0, 1)
        prepare(prepared_section(options, folder / "data"), workers=len(os.sched_getaffinity(0)), progress=False)
        configs = []
        for number, (setting, seed) in enumerate(left):
            decisions = folder / f"decisions_{number}.jsonl"
            draw(options, setting, seed).write(decisions, options.gpt.micro_batches)
            configs.append(
                run_config(options, str(folder / "data"), folder / f"run_{number}", setting, seed, decisions)
            )
        on_progress("runs", len(kept.runs), len(options.runs))
        run_ranks("tools.bench.drops.training_rank", {"configs": configs}, REPLICAS, 1, folder, take)
