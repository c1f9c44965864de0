"""Faults in one replica of Local-SGD between two exchanges, ``python -m tools.bench local-sgd-faults``.

Real launches of three replicas. Values: NaN, or a spike, in the masters of one replica in the last step of a round; the
round must leave it out, and it must return. Times: one replica is killed and another is slower than the deadline, in
the same round; the rounds must go on, and both return. All are trained once more without faults, with the recorded
members (`replay_rounds`): the weights on which the others agree must be the same, bit for bit, in the whole run after
faults in values, whose replica begins anew in both, and after lost and late ones until the first of them returns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import DataError
from megasdc.config.local_sgd import ROUNDS_FILE
from megasdc.events import read_events
from megasdc.localsgd.rounds import Round, read_rounds
from tools.bench.drops.options import LocalFaultOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Report, Result, Told, listing
from tools.bench.small.gpt import prepare_library, small_config

REPLICAS, EVERY, FAULTS_OF_A_RUN = 3, 3, 10
NAN, SPIKE, LOST, SLOW = "NaN", "spike", "lost", "slow"
LEFT_OUT_IN = 4
"""Round in which replicas are lost and slow."""


@dataclass(frozen=True)
class Fault:
    """One fault, as it went.

    Args:
        found: whether the round was made without its replica.
        named: whether it says of the replica that it was wrong; of a lost or slow one, that it was not there.
        returned: whether the replica is a member of a later round.
        equal: whether the others' weights are those of the run without it.
    """

    kind: str
    found: bool
    named: bool
    returned: bool
    equal: bool

    @property
    def passed(self) -> bool:
        """Whether all of that holds."""
        return self.found and self.named and self.returned and self.equal


@dataclass(frozen=True)
class LocalFaultResult(Result):
    """All faults, and clean rounds.

    Args:
        clean: rounds without a fault.
        left_out: replicas that were left out of one of them.
    """

    faults: Sequence[Fault]
    clean: int
    left_out: int

    @property
    def passed(self) -> bool:
        """Whether every fault was found, and nobody was left out of a clean round."""
        return all(one.passed for one in self.faults) and not self.left_out

    def report(self) -> Report:
        """Counts by kind."""
        kinds = [[one for one in self.faults if one.kind == kind] for kind in (NAN, SPIKE, LOST, SLOW)]
        columns: Told = {
            "fault": lambda some: some[0].kind,
            "faults": len,
            "round made without it": lambda some: sum(one.found for one in some),
            "named": lambda some: sum(one.named for one in some),
            "returned": lambda some: sum(one.returned for one in some),
            "others' weights equal": lambda some: sum(one.equal for one in some),
        }
        yield listing("faults in one replica of Local-SGD", columns, filter(None, kinds))
        yield f"{self.clean} clean rounds of {REPLICAS} replicas, {self.left_out} times one was left out"


def bench_local_sgd_faults(options: LocalFaultOptions, on_progress: Progress = ignore_progress) -> LocalFaultResult:
    """Train with faults, and again without.

    Raises:
        DataError: a launch has failed.
    """
    machine, found = describe_machine(), list[Fault]()
    values, times = -(-options.values // FAULTS_OF_A_RUN), options.times
    with scratch_folder() as folder:
        data = prepare_library(folder / "data", options.gpt.vocab, "[a-d]*.py")
        for number in range(values):
            on_progress("faults in values", number, values + times + 1)
            left = min(FAULTS_OF_A_RUN, options.values - number * FAULTS_OF_A_RUN)
            found += _values(options, data, folder / f"values_{number}", number, left)
        for number in range(times):
            on_progress("lost and slow", values + number, values + times + 1)
            found += _times(options, data, folder / f"times_{number}", number)
        on_progress("clean rounds", values + times, values + times + 1)
        clean = _launch(options, data, folder / "clean", options.clean, {})
    left_out = sum(REPLICAS - len(one.members) for one in clean.values())
    return LocalFaultResult(machine, options, found, len(clean), left_out)


def _values(options: LocalFaultOptions, data: Path, folder: Path, number: int, count: int) -> list[Fault]:
    """A run with faults in the values of replica 1, in every third round, and the same without them."""
    place = {"phase": "update", "slot": "weight.master", "replica": 1, "submodule": "*.linear_proj"}
    kinds = [(NAN, SPIKE)[(number + one) % 2] for one in range(count)]
    what: dict[str, dict[str, Any]] = {
        NAN: {"kind": "value", "value": "nan"},
        SPIKE: {"kind": "scale", "factor": options.factor, "elements": 200},
    }
    rounds = [3 * one + 2 for one in range(count)]
    faults = [
        {**place, **what[kind], "steps": [EVERY * at, EVERY * at], "seed": 100 * number + at}
        for kind, at in zip(kinds, rounds, strict=True)
    ]
    made = _launch(options, data, folder, rounds[-1] + 1, {"faults": faults})
    again = _again(options, data, folder, made)
    equal = _digests(folder) == _digests(again)
    return [
        Fault(kind, 1 not in made[at].members, 1 in made[at].left_out, 1 in made[at + 1].members, equal)
        for kind, at in zip(kinds, rounds, strict=True)
    ]


def _times(options: LocalFaultOptions, data: Path, folder: Path, number: int) -> list[Fault]:
    """A run in which one replica is killed in a round and another is slower than the deadline, and one without."""
    lost, slow = ((number + one) % 2 + 1 for one in range(2))
    first = EVERY * (LEFT_OUT_IN - 1) + 1
    sections = {
        "process_faults": [{"kind": "sigkill", "phase": "forward", "replica": lost, "steps": [first, first]}],
        "delay": [
            {"kind": "normal", "mean_s": options.step_s, "std_s": 0.1 * options.step_s},
            {"kind": "slow_rank", "replica": slow, "delay_s": 2 * options.deadline_s, "steps": [first + 1, first + 1]},
        ],
    }
    made = _launch(options, data, folder, options.rounds, sections, deadline_s=options.deadline_s)
    again = _again(options, data, folder, made)
    faults = []
    until = LEFT_OUT_IN
    while until < options.rounds and not {lost, slow} & set(made[until].members):
        until += 1
    digests, others = _digests(folder), _digests(again)
    equal = all(digests[one] == others[one] for one in range(1, until))
    for kind, replica in ((LOST, lost), (SLOW, slow)):
        out = replica not in made[LEFT_OUT_IN].members
        later = any(replica in made[one].members for one in range(LEFT_OUT_IN + 1, options.rounds + 1))
        faults.append(Fault(kind, out, replica in made[LEFT_OUT_IN].absent, later, equal))
    return faults


def _again(options: LocalFaultOptions, data: Path, folder: Path, made: dict[int, Round]) -> Path:
    """Train once more without faults, with the same members; returns the run folder."""
    again = folder.with_name(f"{folder.name}_again")
    log = folder.with_suffix(".jsonl")
    log.write_text("".join(json.dumps(one.as_dict()) + "\n" for one in made.values()), encoding="utf-8")
    _launch(options, data, again, len(made), {}, str(log))
    return again


def _launch(
    options: LocalFaultOptions,
    data: Path,
    folder: Path,
    rounds: int,
    sections: dict[str, Any],
    replayed: str | None = None,
    *,
    deadline_s: float | None = None,
) -> dict[int, Round]:
    """Train so many rounds; returns them."""
    local = {"replicas": REPLICAS, "every": EVERY, "deadline_s": deadline_s, "replay_rounds": replayed}
    own = {"local_sgd": local, "determinism": {"enabled": True}, **sections}
    training = {"eval_interval": 0}
    config = small_config(options.gpt, folder, rounds * EVERY, own, training=training, learning_rate=2e-3, data=data)
    config["megasdc"]["logging"]["run_dir"] = str(folder)
    folder.mkdir()
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "megasdc", "launch", "--replicas", str(REPLICAS), "--num-ranks", "1"]
    done = subprocess.run([*command, "--config", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(f"{folder.name}: the launch has ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return read_rounds(folder / ROUNDS_FILE)


def _digests(folder: Path) -> dict[int, str]:
    """Digest of the weights that the first replica has agreed on, by round."""
    events = read_events(folder / "replica_0", kind="local_sgd", name="round")
    return {one.fields["round"]: one.fields["digest"] for one in events}
