"""What every part needs to train: a crew, data, and worlds of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.crew import Crew, Job, Outcome, world
from gpu.record import Recorder
from gpu.setting import metrics, write_config

LIMIT_S = 120.0


class Bench:
    """Trains small models for one part.

    Args:
        recorder: of the part.
        crew: processes that become ranks.
    """

    def __init__(self, recorder: Recorder, crew: Crew) -> None:
        self.recorder = recorder
        self.folder = recorder.folder
        self.data = recorder.folder.parent / "data"
        self.side = max(2, recorder.cores)
        self.crew = crew
        self._meetings: list[Any] = []

    def config(self, name: str, **changes: Any) -> Path:
        """Write a configuration; see ``write_config``."""
        return write_config(self.folder, name, self.data, self.recorder.device, **changes)

    def ranks(
        self, config: Path, count: int, *overrides: str, environment: Mapping[str, str] | None = None
    ) -> list[Job]:
        """The jobs of a world that trains."""
        jobs = self.world("gpu.jobs:train", count, {"config": str(config), "overrides": list(overrides)})
        return [Job(job.function, job.arguments, {**job.environment, **(environment or {})}) for job in jobs]

    def world(self, function: str, count: int, arguments: Mapping[str, Any]) -> list[Job]:
        """The jobs of a world that calls another function, see ``crew.world``."""
        from megasdc.parallel.local_ranks import LocalMeeting

        self._meetings.append(LocalMeeting())
        return world(function, count, self._meetings[-1].environment, arguments)

    def train(self, worlds: Mapping[str, Sequence[Job]], timeout_s: float = LIMIT_S) -> dict[str, list[Outcome]]:
        """Train worlds, side by side where there are cores; those that end otherwise than with 0 are failed checks."""
        outcomes = self.crew.run_worlds(worlds, timeout_s, self.side)
        for name, ended in outcomes.items():
            bad = [one for one in ended if one.code != 0]
            if bad:
                self.recorder.check(f"{name} trains", False, "\n".join(map(str, bad[:2])))
        return outcomes

    def losses(self, name: str) -> list[float]:
        """Of a run, by the name of its configuration."""
        return metrics(self.folder / name)

    def compare(self, pairs: Mapping[str, tuple[Path, Path]]) -> None:
        """Check that pairs of checkpoints hold the same bits."""
        there = {name: pair for name, pair in pairs.items() if all(one.is_dir() for one in pair)}
        for name in pairs.keys() - there.keys():
            missing = [str(one) for one in pairs[name] if not one.is_dir()]
            self.recorder.check(name, False, f"{', '.join(missing)} was not written")
        if not there:
            return
        arguments = {"pairs": [[str(one) for one in pair] for pair in there.values()]}
        (ended,) = self.crew.run([Job("gpu.jobs:compare_checkpoints", arguments, {})], LIMIT_S)
        if ended.code != 0:
            self.recorder.check("checkpoints can be read", False, str(ended))
            return
        for name, found in zip(there, ended.value, strict=True):
            some = ", ".join(found["differ"][:5])
            self.recorder.check(
                name,
                found["compared"] > 0 and not found["differ"],
                f"{len(found['differ'])} of {found['compared']} values differ{': ' if some else ''}{some}",
            )
