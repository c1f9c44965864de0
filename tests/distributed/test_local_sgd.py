"""Do replicas that train apart end with the weights that a script of ten lines averages?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from whole_runs import events_of, metrics_of, pretrain_rank, state_of, train_run, write_run

from megasdc.localsgd.meeting import MeetingServer
from megasdc.localsgd.rounds import Meeting, Round, read_rounds
from megasdc.parallel.local_ranks import LocalMeeting
from megasdc.parallel.rendezvous import MEETING_VARIABLE, ROUNDS_VARIABLE, SECRET_FILE, TOGETHER_VARIABLE
from megasdc.sdc.incident import load_incidents

pytestmark = pytest.mark.distributed

AT_END = {"training__eval_interval": 6}
"""Changes for runs that evaluate where any number of local steps ends."""
HOOK = Path(__file__).with_name("averaging_hook.py")


def _rank(configs: list[str], folders: list[str], ranks: int, overrides: list[str]) -> tuple[int, str | None]:
    """Body of a rank of one of several launches, each of which has ``ranks``."""
    rank = int(os.environ["RANK"])
    replica, own = divmod(rank, ranks)
    os.environ |= {"RANK": str(own), "LOCAL_RANK": str(own), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {MEETING_VARIABLE: folders[replica], "MASTER_PORT": "0"}
    return pretrain_rank(configs[replica], overrides)


def train_replicas(
    configs: list[Path], ranks: int, *overrides: str, number: int = 0, deadline_s: float | None = None, **options: Any
) -> tuple[list[Any], list[Round]]:
    """Train replicas, each a launch of so many ranks; returns exit codes with messages, and the rounds.

    ``number``: of all replicas, of which others are not there; 0: none is missing.
    """
    together, rounds, number = LocalMeeting(), list[Round](), number or len(configs)
    os.environ[TOGETHER_VARIABLE] = str(together.folder)
    meetings = [LocalMeeting() for _ in configs]
    secret = bytes.fromhex((together.folder / SECRET_FILE).read_text())
    start_s = 600.0 if number == len(configs) else 5.0
    meeting = Meeting(number, deadline_s, rounds.append, **options)
    server = MeetingServer(meeting, number, "127.0.0.1", secret, start_s=start_s)
    try:
        env = {ROUNDS_VARIABLE: f"127.0.0.1:{server.port}", TOGETHER_VARIABLE: str(together.folder)}
        folders = [str(one.folder) for one in meetings]
        found = run_distributed(
            _rank,
            len(configs) * ranks,
            *(list(map(str, configs)), folders, ranks, list(overrides)),
            init=False,
            env=env,
        )
    finally:
        server.close()
        del os.environ[TOGETHER_VARIABLE]
        for one in (together, *meetings):
            one.close()
    return found, rounds


def write_replicas(folder: Path, data: Path, name: str, number: int, every: int, **changes: Any) -> list[Path]:
    """Configurations of so many replicas."""
    return [
        write_run(
            folder,
            data,
            f"{name}_{replica}",
            **{"local_sgd": {"replicas": number, "replica": replica, "every": every}, **AT_END, **changes},
        )
        for replica in range(number)
    ]


def weights_of(run_dir: Path, steps: int = 6) -> dict[str, str]:
    """Digests of weights, masters and moments at the end."""
    saved = state_of(run_dir / "checkpoints" / f"step_{steps:08d}")
    return {name: one for name, one in saved.items() if "optim" in name or "layer_" in name or "module" in name}


@pytest.mark.parametrize(
    ("number", "ranks", "every", "changes"),
    [(2, 1, 2, {}), (3, 1, 1, {"local_sgd__outer": "nesterov"}), (2, 2, 3, {"deepspeed__bf16": {"enabled": True}})],
    ids=["average", "nesterov", "bf16_zero1"],
)
def test_weights_are_those_that_a_script_averages(
    tmp_path: Path, data: Path, number: int, ranks: int, every: int, changes: dict[str, Any]
) -> None:
    """Losses, weights, masters and moments of each replica have the bits of single runs that a script averages."""
    _equals_the_script(tmp_path, data, number, ranks, every, 6, changes)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [{"parallel__tensor": 2}, {"parallel__pipeline": 2}, {"protect": "standard"}], ids=["tp2", "pp2", "dp2"]
)
def test_replicas_of_several_ranks_equal_the_script(tmp_path: Path, data: Path, changes: dict[str, Any]) -> None:
    """Tensor and pipeline ranks, and data ranks that are protected, inside each of two replicas."""
    _equals_the_script(tmp_path, data, 2, 2, 2, 6, changes)


@pytest.mark.full
@pytest.mark.parametrize("outer", ["average", "nesterov"])
@pytest.mark.parametrize("every", [1, 4, 16])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_all_numbers_and_rounds_equal_the_script(
    tmp_path: Path, data: Path, number: int, every: int, outer: str
) -> None:
    """The same over the grid of numbers of replicas, lengths of rounds and outer rules."""
    changes = {"training__steps": 16, "training__eval_interval": 16, "local_sgd__outer": outer}
    _equals_the_script(tmp_path, data, number, 1, every, 16, changes)


def _equals_the_script(
    tmp_path: Path, data: Path, number: int, ranks: int, every: int, steps: int, changes: dict[str, Any]
) -> None:
    changes = {**AT_END, **changes}
    outer = changes.pop("local_sgd__outer", "average")
    sections = [{"replicas": number, "replica": one, "every": every, "outer": outer} for one in range(number)]
    configs = [write_run(tmp_path, data, f"run_{one}", local_sgd=sections[one], **changes) for one in range(number)]
    found, rounds = train_replicas(configs, ranks)
    assert [code for code, _ in found if code] == [], found
    assert [one.round for one in rounds] == list(range(1, steps // every + 1))
    assert all(one.members == tuple(range(number)) and not one.left_out for one in rounds)
    (tmp_path / "files").mkdir()
    env = {"AVERAGING": f"{tmp_path / 'files'} {number} {every} {int(outer == 'nesterov')}"}
    alone = [write_run(tmp_path, data, f"alone_{one}", hooks=[f"{HOOK}:Averaging"], **changes) for one in range(number)]
    meetings = [LocalMeeting() for _ in alone]
    folders = [str(one.folder) for one in meetings]
    found = run_distributed(_alone, number * ranks, list(map(str, alone)), folders, ranks, init=False, env=env)
    assert [code for code, _ in found if code] == [], found
    for meeting in meetings:
        meeting.close()
    for one in range(number):
        run, single = (weights_of(tmp_path / f"{name}_{one}", steps) for name in ("run", "alone"))
        assert metrics_of(tmp_path / f"run_{one}") == metrics_of(tmp_path / f"alone_{one}") and run == single
    ends = {str(sorted(weights_of(tmp_path / f"run_{one}", steps).items())) for one in range(number)}
    assert len(ends) == number, "moments are each replica's own"


def test_a_run_that_is_stopped_goes_on_with_the_same_bits(tmp_path: Path, data: Path) -> None:
    """Within a round, with dropout and the outer optimizer's momentum: both replicas end as without the stop."""
    changes = {"model__hidden_dropout": 0.1, "local_sgd__outer": "nesterov"}
    for name in ("whole", "stopped"):
        configs = write_replicas(tmp_path, data, name, 2, 3, **changes)
        for stop in (4, 6) if name == "stopped" else (6,):
            found, rounds = train_replicas(configs, 1, f"megasdc.training.stop_step={stop}")
            assert [code for code, _ in found if code] == [], found
    assert [one.round for one in rounds] == [2]
    for one in range(2):
        assert weights_of(tmp_path / f"whole_{one}") == weights_of(tmp_path / f"stopped_{one}")


def test_a_late_replica_joins_with_what_it_has(tmp_path: Path, data: Path) -> None:
    """One that is past the threshold stops within a step, its weights count by their tokens, and both go on at the next
    round; without delays the same decisions give the same bits.
    """
    slow = {"delay": [{"kind": "slow_rank", "replica": 1, "delay_s": 0.3}]}
    changes = {"deepspeed__train_batch_size": 3, **AT_END}
    section = {"replicas": 2, "every": 3}
    given = [{**section, "replica": one, "threshold": 2.0} for one in range(2)]
    configs = [write_run(tmp_path, data, f"run_{one}", local_sgd=given[one], **changes, **slow) for one in range(2)]
    found, rounds = train_replicas(configs, 1)
    assert [code for code, _ in found if code] == [], found
    assert [one.members for one in rounds] == [(0, 1)] * 2
    for one in rounds:
        assert one.micro_batches[0] == 9 and 3 < one.micro_batches[1] < 9 and one.steps[1] < 4
        assert one.tokens == {replica: 32 * done for replica, done in one.micro_batches.items()}
    log = tmp_path / "rounds.jsonl"
    log.write_text("".join(json.dumps(one.as_dict()) + "\n" for one in rounds))
    again = [
        write_run(
            tmp_path, data, f"again_{one}", local_sgd={**section, "replica": one, "replay_rounds": str(log)}, **changes
        )
        for one in range(2)
    ]
    found, repeated = train_replicas(again, 1, replayed=read_rounds(log))
    assert [code for code, _ in found if code] == [], found
    assert [(one.steps, one.micro_batches, one.norms) for one in repeated] == [
        (one.steps, one.micro_batches, one.norms) for one in rounds
    ]
    for one in range(2):
        assert metrics_of(tmp_path / f"run_{one}") == metrics_of(tmp_path / f"again_{one}")
        assert weights_of(tmp_path / f"run_{one}") == weights_of(tmp_path / f"again_{one}")


def test_one_that_is_late_in_the_last_round_takes_over_what_the_others_ended_with(tmp_path: Path, data: Path) -> None:
    """Who is done waits until the late one has its weights; both end with the same."""
    slow = {"delay": [{"kind": "slow_rank", "replica": 1, "delay_s": 1.5, "steps": [4, 6]}]}
    configs = write_replicas(tmp_path, data, "run", 2, 3, deepspeed__train_batch_size=1, **slow)
    found, rounds = train_replicas(configs, 1, deadline_s=1.0)
    assert [code for code, _ in found if code] == [], found
    assert [(one.members, one.absent) for one in rounds] == [((0, 1), ()), ((0,), (1,))]
    (told,) = events_of(tmp_path / "run_1", "local_sgd", "left_out")
    assert (told["round"], told["wrong"]) == (2, False)
    ends = [
        {name: one for name, one in weights_of(tmp_path / f"run_{one}").items() if "layer_" in name} for one in (0, 1)
    ]
    assert ends[0] == ends[1] != {}


@pytest.mark.full
def test_drops_inside_a_replica_and_of_its_round(tmp_path: Path, data: Path) -> None:
    """A replica of two data ranks drops micro-batches within its steps, and ends its round after a whole one; weights
    count by the tokens that were used.
    """
    section = {"replicas": 2, "every": 3, "threshold": 1.2}
    slow = {"delay": [{"kind": "slow_rank", "replica": 3, "delay_s": 0.4}]}
    drops = {"drop_compute": {"enabled": True, "threshold": 0.7, "samples": "discard", "warmup_steps": 0}}
    changes = {"deepspeed__train_batch_size": 8, **AT_END, **slow, **drops}
    configs = [
        write_run(tmp_path, data, f"run_{one}", local_sgd={**section, "replica": one}, **changes) for one in (0, 1)
    ]
    found, rounds = train_replicas(configs, 2)
    assert [code for code, _ in found if code] == [], found
    assert [one.members for one in rounds] == [(0, 1)] * 2
    for one in rounds:
        assert one.steps[0] == 3 and one.micro_batches[0] == 24, one
        assert one.steps[1] == 2 and one.micro_batches[1] == 12, "half of the slow rank's were dropped in each step"
        assert one.tokens == {replica: 32 * done for replica, done in one.micro_batches.items()}
    assert not any(event["wrong"] for event in events_of(tmp_path / "run_1", "local_sgd", "left_out"))


def test_one_local_step_is_synchronous_sgd(tmp_path: Path, data: Path) -> None:
    """With plain SGD, no clipping and equal tokens, H = 1 trains as one run of two data ranks, within rounding."""
    changes = {"hooks": [f"{HOOK}:PlainSgd"], "deepspeed__gradient_clipping": 0.0, **AT_END}
    halves = write_replicas(tmp_path, data, "half", 2, 1, deepspeed__train_batch_size=2, **changes)
    found, _ = train_replicas(halves, 1)
    assert [code for code, _ in found if code] == [], found
    whole = write_run(tmp_path, data, "whole", **changes)
    assert [code for code, _ in train_run(whole, 2) if code] == []
    losses = [
        [row["train/loss"] for row in metrics_of(tmp_path / name) if "train/loss" in row]
        for name in ("half_0", "half_1", "whole")
    ]
    assert [(one + other) / 2 for one, other in zip(*losses[:2], strict=True)] == pytest.approx(losses[2], rel=1e-5)
    ends = [
        {
            path.name: torch.load(path, weights_only=False)
            for path in sorted((tmp_path / name / "checkpoints" / "step_00000006").glob("layer_*.pt"))
        }
        for name in ("half_0", "whole")
    ]
    assert ends[0].keys() == ends[1].keys() and len(ends[0]) > 3
    for name, layer in ends[0].items():
        for key, value in layer.items():
            torch.testing.assert_close(value, ends[1][name][key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [{"kind": "value", "value": "nan"}, {"kind": "scale", "factor": 1000.0, "elements": 500}],
    ids=["nan", "scale"],
)
def test_a_wrong_replica_is_left_out_and_returns(tmp_path: Path, data: Path, kind: dict[str, Any]) -> None:
    """The others end the round as a run without it does; it takes over their weights, and is a member of the next."""
    fault = {"phase": "update", "slot": "weight.master", "submodule": "3.*.linear_proj", "replica": 1, "steps": [3, 3]}
    configs = write_replicas(tmp_path, data, "run", 3, 3, faults=[{**fault, **kind}])
    found, rounds = train_replicas(configs, 1)
    assert [code for code, _ in found if code] == [], found
    assert [one.members for one in rounds] == [(0, 2), (0, 1, 2)]
    assert list(rounds[0].left_out) == [1]
    (told,) = events_of(tmp_path / "run_1", "local_sgd", "left_out")
    assert told["wrong"] and told["round"] == 1
    ((_, incident),) = load_incidents(tmp_path / "run_1" / "reports", [])
    assert (incident.tier, incident.done, incident.round.replica, incident.round.round) == ("round", "left out", 1, 1)
    assert incident.round.reason == rounds[0].left_out[1] and incident.injected == ("megasdc.faults",)
    assert incident.round.look == rounds[0].looks[1] and set(incident.round.look.others) == {0, 2}
    assert incident.round.look.finite == ("value" not in kind)
    for other in ("run_0", "run_2"):
        (without,) = events_of(tmp_path / other, "local_sgd", "without")
        assert without == {"rank": 0, "step": 3, "round": 1, "left_out": {"1": incident.round.reason}, "absent": []}
        assert not load_incidents(tmp_path / other / "reports", [])
    fetched = events_of(tmp_path / "run_0", "local_sgd", "round")
    assert fetched[1]["fetched_bytes"] == 2 * fetched[0]["fetched_bytes"] > 0 and fetched[0]["waited_s"] >= 0
    two = write_replicas(tmp_path, data, "two", 3, 3)
    found, without = train_replicas([two[0], two[2]], 1, number=3)
    assert [code for code, _ in found if code] == [] and without[0].members == (0, 2), found
    assert without[0].norms == rounds[0].norms
    digests = [events_of(tmp_path / f"{name}_0", "local_sgd", "round")[0]["digest"] for name in ("run", "two")]
    assert digests[0] == digests[1]


def test_each_has_an_incident_where_no_replica_can_be_relied_on(tmp_path: Path, data: Path) -> None:
    """All end with exit code 73, which says why of each."""
    fault = {"phase": "update", "slot": "weight.master", "submodule": "3.*.linear_proj", "steps": [3, 3]}
    configs = write_replicas(tmp_path, data, "run", 2, 3, faults=[{**fault, "kind": "value", "value": "nan"}])
    found, rounds = train_replicas(configs, 1)
    assert [code for code, _ in found] == [73, 73] and not rounds
    for replica, (_, message) in enumerate(found):
        assert "replica 0: its weights are not finite; replica 1: its weights are not finite" in message
        ((_, incident),) = load_incidents(tmp_path / f"run_{replica}" / "reports", [])
        assert (incident.tier, incident.round.replica, incident.round.round) == ("round", replica, 1)
        assert not incident.round.look.finite and "not finite" in incident.round.reason


def _alone(configs: list[str], folders: list[str], ranks: int) -> tuple[int, str | None]:
    """Body of a rank of one of several single runs, which take disjoint samples of the stream."""
    import megasdc.train.build as build

    replica = int(os.environ["RANK"]) // ranks
    os.environ["AVERAGED_RUN"] = str(replica)
    number, loader = len(configs), build.MicroBatchLoader

    class Strided:
        def __init__(self, stream: Any) -> None:
            self.stream, self.path, self.vocab_size, self.identity = stream, stream.path, stream.vocab_size, "strided"

        def __len__(self) -> int:
            return len(self.stream) // number

        def extend(self, samples: int) -> None:
            self.stream.extend(samples * number)

        def __getitem__(self, place: int) -> Any:
            self.stream.extend(place * number + number)
            return self.stream[range(replica, 1 << 40, number)[place]]

    def strided(stream: Any, *arguments: Any, **options: Any) -> Any:
        stream.extend(len(stream) * number)
        return loader(Strided(stream), *arguments, **options)

    build.MicroBatchLoader = strided  # type: ignore[assignment,misc]
    return _rank(configs, folders, ranks, [])
