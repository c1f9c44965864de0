"""How do tests write the folder of a run that never ran? With the writers that a run uses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megasdc.common.addresses import Address
from megasdc.config.load import load_config
from megasdc.config.local_sgd import ROUNDS_FILE
from megasdc.events import EventLog
from megasdc.localsgd.rounds import Round
from megasdc.metrics.writer import MetricsWriter
from megasdc.ops.health.incident import conclude
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.rank_state import RankState
from megasdc.sdc.incident import Environment, FlaggedRank, Incident, IncidentEvidence, RankPlace, RoundLook
from megasdc.sdc.incident_page import write_incident

SMOKE = Path(__file__).parents[4] / "configs" / "smoke.json"
VERSIONS = {"megasdc": "0.1.0", "torch": "2.13.0"}


def losses(steps: int, seed: int = 3, worse: float = 0.0) -> np.ndarray:
    """A falling loss with noise; ``worse``: relative, growing to that share over the steps."""
    noise = np.random.default_rng(seed).normal(0, 0.01, steps)
    return (3 + 4 * np.exp(-np.arange(steps) / 20) + noise) * (1 + worse * np.arange(1, steps + 1) / steps)


def write_run(
    folder: Path, loss: np.ndarray, planned: int | None = None, ended: bool = True, settings: tuple[str, ...] = ()
) -> Path:
    """Write a run: a line of metrics a step, an evaluation every ten, a save every twenty, faults on rank 1.

    Args:
        folder: the run folder.
        loss: of each step; NaN where it was not finite.
        planned: steps of the whole run; null: as many as there are.
        ended: whether its end was told.
        settings: further overrides of the configuration.
    """
    steps = len(loss)
    planned = steps if planned is None else planned
    config = load_config(SMOKE, [f"megasdc.training.steps={planned}", *settings])
    folder.mkdir(parents=True)
    (folder / "resolved.json").write_text(json.dumps(config.resolved()))
    events = [EventLog(folder, rank) for rank in range(2)]
    layout = {"tensor": 1, "pipeline": 1, "data": 2}
    events[0].emit("start", "run", layout=layout, world_size=2, versions=VERSIONS)
    writer = MetricsWriter(folder)
    for step, value in enumerate(loss.tolist(), 1):
        norm = 1e6 if step == 33 else 1.0 + 0.01 * step
        writer.write(step, {"train/loss": value, "train/grad_norm": norm, "speed/tokens_per_s": 1000.0 + step})
        if step % 10 == 0:
            writer.write(step, {"eval/loss": value + 0.1})
            events[1].emit("fault", "injected", step=step, micro_batch=0, fqn="2.layer.mlp.linear_fc1", phase="forward")
            events[1].emit("fault", "injected", step=step, micro_batch=1, fqn="3.layer.mlp.linear_fc2", phase="forward")
        if step % 20 == 0:
            events[0].emit("save", "checkpoint", step=step, path=f"step_{step:08d}")
    if ended:
        events[0].emit("end", "run", step=steps, reason="all steps done", results={})
    for one in (writer, *events):
        one.close()
    return folder


def add_incident(folder: Path, step: int) -> Path:
    """Write an incident's page and JSON, and its events; returns the page."""
    first = Address(step, 0, "forward", "2.layer.mlp.linear_fc1", "output")
    place = RankPlace(1, "node7", "cpu", 1, 0, 0)
    flagged = FlaggedRank(
        **vars(place), verdict="persistent", first=first, expected="0" * 16, got="1" * 16, repeats=2, wrong_repeats=2,
        rate_bound=None,
    )  # fmt: skip
    _, page = write_incident(
        Incident(
            time="2026-11-20T10:00:00+00:00",
            run_dir=str(folder),
            step=step,
            micro_batch=0,
            tier="audit",
            verdict="persistent",
            basis="relative to the majority",
            policy="repair",
            done="repaired",
            flagged=(flagged,),
            disputed=(),
            ranks=(place,),
            evidence=IncidentEvidence(4, {}),
            environment=Environment({}, {}, "fp32"),
        )
    )
    log = EventLog(folder, 0)
    log.emit("sdc", "finding", step=step, tier="audit", address=str(first))
    log.emit("sdc", "verdict", step=step, tier="audit", action="repair", verdict="persistent")
    log.close()
    return page


def add_hang(folder: Path, step: int, run: str = "abc") -> Path:
    """Write the incident of a standstill: rank 1 hangs in the forward pass, rank 0 waits for its activation."""
    phases = [Phase.RECEIVE_GRADIENT, Phase.FORWARD]
    states = [RankState(rank, f"node{rank}", rank, 0, 0, step, 0, phase, 31.5) for rank, phase in enumerate(phases)]
    stacks = {
        "0": {"MainThread x": ["a.py:1 outer", "b.py:2 wait"]},
        "1": {"MainThread x": ["a.py:1 outer", "c.py:3 spin"]},
    }
    report = {"run": run, "states": [asdict(one) for one in states], "stacks": stacks, "devices": {}, "addresses": []}
    conclusion = conclude(folder / "health", ["node0", "node1"], [report], [])
    conclusion.write()
    return conclusion.path


def columns(path: Path) -> dict[str, list[str]]:
    """A CSV file by heading."""
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    return {name: [row[place] for row in rows] for place, name in enumerate(head)}


def data_of(page: Path) -> dict[str, Any]:
    """What a page's script is given."""
    return json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])


def write_replicas(folder: Path, threshold: str = "3.0") -> list[Round]:
    """Write a launch of two replicas of Local-SGD, 6 rounds of 5 steps; the second is wrong in round 2, late in 4, 5.

    In round 3 it has computed half of its micro-batches, since it was past the threshold. Returns the rounds.
    """
    reason = "its weights are not finite"
    looks = {1: RoundLook(False, True, 0.0, {0: 2.0}, 1, 2.0, 0.0, 5, {0: 5})}
    rounds = []
    for number in range(1, 7):
        members = (0,) if number in (2, 4, 5) else (0, 1)
        counts = {one: 5 if (one, number) == (1, 3) else 10 for one in members}
        is_wrong, absent = number == 2, (1,) if number in (4, 5) else ()
        wrong = {1: reason} if is_wrong else {}
        tokens, steps = {one: 100 * counts[one] for one in members}, dict.fromkeys(members, 5)
        norms = {one: 2.0 + one for one in members}
        rounds.append(
            Round(number, members, tokens, steps, counts, norms, wrong, absent, 3.0, looks if is_wrong else {})
        )
    for replica in range(2):
        sets = ("replicas=2", f"replica={replica}", "every=5", f"threshold={threshold}")
        settings = (*(f"megasdc.local_sgd.{one}" for one in sets), "train_batch_size=8")
        own = write_run(folder / f"replica_{replica}", losses(30, seed=replica), settings=settings)
        events, writer = EventLog(own, 0), MetricsWriter(own)
        for one in rounds:
            step = 5 * one.round
            writer.write(step, {"local_sgd/outer_norm": 2.0 + replica, "local_sgd/exchange_s": 0.5 + replica})
            if replica in one.members:
                told = {"members": one.members, "fetched_bytes": 1000 * (len(one.members) - 1), "waited_s": 0.25}
                events.emit("local_sgd", "round", step=step, round=one.round, **told)
                if len(one.members) == 1:
                    without = {"left_out": one.left_out, "absent": one.absent}
                    events.emit("local_sgd", "without", step=step, round=one.round, **without)
            else:
                why = {"reason": one.left_out.get(1, "it was late"), "wrong": 1 in one.left_out}
                events.emit("local_sgd", "left_out", step=step, round=one.round, **why)
        events.close()
        writer.close()
    with open(folder / ROUNDS_FILE, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(one.as_dict()) + "\n" for one in rounds)
    return rounds
