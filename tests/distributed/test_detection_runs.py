"""Do whole runs find wrong ranks before a step is committed, name them, and act by policy?"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import (
    checked,
    end_of,
    events_of,
    failure_of,
    pretrain_rank,
    state_of,
    train_run,
    verdicts_of,
    write_run,
)

from megasdc.checkpoint.files import list_steps
from megasdc.checkpoint.verify import find_corruption, find_standing, list_verified
from megasdc.config.load import load_config
from megasdc.events import read_events
from megasdc.ops.golden.record import record_golden_trace
from megasdc.ops.run_folder.summary import summarize_run
from megasdc.sdc.incident import incident_from_json

pytestmark = pytest.mark.distributed

AUDITED = {"determinism": {"enabled": True}, "audit": {"enabled": True, "interval": 2}}


def _write(tmp_path: Path, data: Path, name: str, replicas: int, **changes: Any) -> Path:
    batch = {"deepspeed__train_batch_size": 2 * replicas, "checkpoint__interval": 3}
    return write_run(tmp_path, data, name, **{**AUDITED, **batch, **changes})


GUARDED = {**checked(coverage="one"), "audit": {"enabled": False}}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The folder of a clean run on two replicas with always-on checks."""
    folder = tmp_path_factory.mktemp("guarded")
    results = train_run(_write(folder, data, "clean", 2, **GUARDED), 2)
    assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(folder / "clean") == []
    return folder / "clean"


@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [pytest.param(1, 1, marks=pytest.mark.full), (2, 1), (1, 2)],
    ids=["dp3", "tp2dp3", "pp2dp3"],
)
def test_a_fault_of_one_micro_batch_is_named_and_repaired(
    tmp_path: Path, data: Path, tensor: int, pipeline: int
) -> None:
    """A transient fault is detected, the right rank named, and the repaired run ends with the bits of a clean one."""
    layout = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    ranks = 3 * tensor * pipeline
    wrong = ranks - 2
    fault = {"submodule": "*.linear_fc2", "phase": "backward", "rank": wrong, "steps": [4, 4], "once": True}
    clean = _write(tmp_path, data, "clean", 3, **layout)
    harmed = _write(tmp_path, data, "harmed", 3, **layout, faults=[{**fault, "micro_batches": [0]}])
    for config in (clean, harmed):
        results = train_run(config, ranks)
        assert [code for code, _ in results if code] == [], results
    assert verdicts_of(tmp_path / "clean") == []
    assert [one["step"] for one in events_of(tmp_path / "clean", "audit", "agreed")] == [1, 2, 4, 6]
    assert verdicts_of(tmp_path / "harmed") == [
        (4, "audit", wrong, "not_reproduced", "relative to the majority", "repair")
    ]
    assert end_of(tmp_path / "clean") == end_of(tmp_path / "harmed")
    assert [
        find_standing(tmp_path / "harmed" / "checkpoints" / f"step_0000000{step}").audit_step for step in (3, 6)
    ] == [
        4,
        None,
    ]


def test_a_persistent_fault_halts_all_ranks(tmp_path: Path, data: Path) -> None:
    """A rank that is wrong each time is named; nothing of its step is committed, and every rank exits with 73."""
    fault = {"submodule": "*.linear_qkv", "rank": 2, "steps": [4, None], "same_elements": True, "bits": "exponent"}
    (tmp_path / "run" / "events").mkdir(parents=True)
    broken = tmp_path / "run" / "events" / "rank_00009.jsonl"  # of an earlier start
    broken.write_bytes(b'{"torn": \xff\n')
    program = "import shutil, sys; shutil.copyfileobj(sys.stdin, open(sys.argv[1], 'w')); sys.exit('no mail server')"
    failing = {"health__alert_command": [sys.executable, "-c", program, str(tmp_path / "alert")]}
    results = train_run(_write(tmp_path, data, "run", 3, faults=[fault], **failing), 3)
    broken.unlink()
    assert (tmp_path / "alert").read_text() == (tmp_path / "run/reports/incident_step_00000004.json").read_text()
    (failed,) = events_of(tmp_path / "run", "health", "alert_failed")
    assert failed["problem"].endswith("ended with 1: no mail server"), "it is told, and the run ends as without it"
    assert [code for code, _ in results] == [73, 73, 73]
    assert all("rank 2" in str(message) and "persistent" in str(message) for _, message in results)
    assert verdicts_of(tmp_path / "run") == [(4, "audit", 2, "persistent", "referee", "halt")]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")) == ["step_00000003"]
    incident = incident_from_json((tmp_path / "run" / "reports" / "incident_step_00000004.json").read_text())
    (named,) = incident.flagged
    assert (named.rank, named.first.fqn, named.first.phase) == (2, "2.layer.self_attention.linear_qkv", "forward")
    assert (named.repeats, named.wrong_repeats, incident.done) == (5, 5, "halted")
    assert incident.evidence.differing["forward"][named.first.fqn] == {2: 1}
    (gap,) = incident.not_read
    assert "rank_00009.jsonl:1 is not an event" in gap, "what cannot be read keeps nobody from halting"
    assert "incident_step_00000004.html" in str(find_corruption(tmp_path / "run" / "checkpoints"))
    page = (tmp_path / "run" / "reports" / "incident_step_00000004.html").read_text()
    assert "rank 2 on host" in page and named.first.fqn in page
    failed = failure_of(tmp_path / "run")
    assert (failed.exit_code, failed.verdict) == (73, "persistent")
    assert (failed.repeats, failed.injected) == ("wrong by the same value in 5 of 5 repeats", ["megasdc.faults"])
    assert failed.incident == str(tmp_path / "run" / "reports" / "incident_step_00000004.html")
    assert (
        len(failed.suspects) == 1
        and failed.suspects[0].startswith(f"rank 2 on {failed.host} (")
        and failed.verified_checkpoint is None
    )
    # The next start takes only what an audit has verified, and there is nothing: step 3 came after the audit of step 2.
    results = train_run(_write(tmp_path, data, "run", 3), 3)
    assert [code for code, _ in results] == [72, 72, 72]
    failed = failure_of(tmp_path / "run")
    assert (failed.exit_code, failed.verdict, failed.incident) == (72, None, None), "of this start, not of the last"
    results = train_run(_write(tmp_path, data, "run", 3, checkpoint__require_verified="never"), 3)
    assert [code for code, _ in results] == [0, 0, 0], results
    assert summarize_run(tmp_path / "run").failure is None


def test_a_wrong_result_of_a_fused_submodule_is_named(tmp_path: Path, data: Path) -> None:
    """With ``model.fuse`` a rank whose activation is wrong each time is named with that submodule."""
    fault = {"submodule": "2.layer.mlp.activation", "rank": 2, "steps": [4, None], "same_elements": True}
    config = _write(tmp_path, data, "run", 3, faults=[{**fault, "bits": "exponent"}], model__fuse=True)
    assert [code for code, _ in train_run(config, 3)] == [73, 73, 73]
    assert verdicts_of(tmp_path / "run") == [(4, "audit", 2, "persistent", "referee", "halt")]
    incident = incident_from_json((tmp_path / "run" / "reports" / "incident_step_00000004.json").read_text())
    (named,) = incident.flagged
    assert (named.rank, named.first.fqn, named.first.phase) == (2, "2.layer.mlp.activation", "forward")


def test_of_two_replicas_the_one_that_varies_is_named(tmp_path: Path, data: Path) -> None:
    """With two replicas a transient fault is named by replay."""
    fault = {"submodule": "*.linear_fc1", "phase": "weight_grad", "rank": 1, "steps": [2, 2], "micro_batches": [0]}
    results = train_run(_write(tmp_path, data, "run", 2, faults=[{**fault, "once": True}]), 2)
    assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(tmp_path / "run") == [(2, "audit", 1, "not_reproduced", "replay", "repair")]


@pytest.mark.parametrize(
    ("submodule", "phase", "slot", "options"),
    [
        ("*.linear_qkv", "forward", "output", {}),
        pytest.param(
            "*.linear_fc2", "forward", "output", {"deepspeed__bf16": {"enabled": True}}, marks=pytest.mark.full
        ),
        pytest.param(
            "*.linear_proj", "backward", "input", {"deepspeed__bf16": {"enabled": True}}, marks=pytest.mark.full
        ),
        ("*.linear_fc1", "weight_grad", "weight", {"deepspeed__pipeline": {"activation_checkpoint_interval": 1}}),
        ("*.self_attn_bda", "forward", "output", {"model__hidden_dropout": 0.1, "deepspeed__bf16": {"enabled": True}}),
        pytest.param("*.mlp_bda", "backward", "input", {"model__hidden_dropout": 0.1}, marks=pytest.mark.full),
        ("*.pre_mlp_layernorm", "forward", "output", {}),
        pytest.param("*.mlp.activation", "forward", "output", {}, marks=pytest.mark.full),
        ("*.core_attention", "forward", "output", {"deepspeed__bf16": {"enabled": True}}),
        pytest.param("*.input_layernorm", "backward", "input", {}, marks=pytest.mark.full),
        pytest.param("*.pre_mlp_layernorm", "weight_grad", "weight", {}, marks=pytest.mark.full),
        pytest.param("*.linear_proj", "weight_grad", "bias", {}, marks=pytest.mark.full),
        pytest.param(
            "0.word_embeddings", "forward", "output", {"deepspeed__bf16": {"enabled": True}}, marks=pytest.mark.full
        ),
    ],
)
def test_of_two_replicas_the_referee_names_the_wrong_one(
    tmp_path: Path, data: Path, submodule: str, phase: str, slot: str, options: dict[str, Any]
) -> None:
    """A persistent fault that both repeat: the product is computed in fp64, and only one result is near it."""
    fault = {"submodule": submodule, "phase": phase, "slot": slot, "rank": 1, "kind": "scale", "factor": 1.5}
    harm = {"faults": [{**fault, "elements": 3, "same_elements": True, "steps": [2, None]}]}
    results = train_run(_write(tmp_path, data, "run", 2, **harm, **options), 2)
    assert [code for code, _ in results] == [73, 73], results
    assert verdicts_of(tmp_path / "run") == [(2, "audit", 1, "persistent", "referee", "halt")]
    (opinion,) = events_of(tmp_path / "run", "sdc", "referee")
    assert opinion["within"] == {"0": True, "1": False} and 1 <= opinion["elements"] <= 3
    values, exact, bound = (opinion["worst"][name] for name in ("values", "exact", "bound"))
    assert abs(float(values["0"]) - exact) <= bound < abs(float(values["1"]) - exact)
    page = (tmp_path / "run" / "reports" / "incident_step_00000002.html").read_text()
    assert values["1"] in page and str(exact) in page and "outside: wrong" in page


def test_two_replicas_whose_fault_rounding_may_explain_need_a_golden_trace(tmp_path: Path, data: Path) -> None:
    """Without one nobody is named; with one of this machine the wrong rank alone is, with dropout too."""
    fault = {"submodule": "*.linear_qkv", "rank": 0, "same_elements": True, "bits": [0]}
    golden = {"vocab_size": 256, "micro_batches": 1, "steps": 1}
    model = {"model__hidden_dropout": 0.1}
    trusted = _write(tmp_path, data, "trusted", 2, golden=golden, **model)
    record_golden_trace(load_config(trusted), tmp_path / "good.golden", repeats=1)
    harm = {"faults": [{**fault, "steps": [2, None]}]}
    blind = _write(tmp_path, data, "blind", 2, **model, **harm)
    results = train_run(blind, 2)
    assert [code for code, _ in results] == [73, 73]
    assert verdicts_of(tmp_path / "blind") == [(2, "audit", None, "inconclusive", "replay", "halt")]
    seeing = _write(tmp_path, data, "seeing", 2, **harm, **model, sdc={"golden": str(tmp_path / "good.golden")})
    results = train_run(seeing, 2)
    assert [code for code, _ in results] == [73, 73]
    assert [one[1:] for one in verdicts_of(tmp_path / "seeing")] == [("audit", 0, "persistent", "golden trace", "halt")]


def test_a_forward_fault_shows_against_its_recomputation(tmp_path: Path, data: Path) -> None:
    """With one replica, no audit and recompute, a transient forward fault names its rank and is repaired."""
    options = {
        "audit": {"enabled": False},
        "sdc": {"always_on": {"enabled": True, "coverage": "all"}},
        "deepspeed__pipeline": {"activation_checkpoint_interval": 1},
        "parallel__pipeline": 2,
    }
    fault = {"submodule": "3.layer.mlp.linear_fc2", "rank": 1, "steps": [3, 3], "micro_batches": [1], "once": True}
    clean = _write(tmp_path, data, "clean", 1, **options)
    harmed = _write(tmp_path, data, "harmed", 1, **options, faults=[fault])
    for config in (clean, harmed):
        results = train_run(config, 2)
        assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(tmp_path / "clean") == []
    assert verdicts_of(tmp_path / "harmed") == [(3, "recompute", 1, "not_reproduced", "own recomputation", "repair")]
    assert end_of(tmp_path / "clean") == end_of(tmp_path / "harmed")


def test_wrong_parameters_are_gathered_again(tmp_path: Path, data: Path) -> None:
    """Parameters that changed after the all-gather are found before the next commit and taken from their owners.

    In bf16; in fp32 below, before a save.
    """
    options = {**GUARDED, "deepspeed__bf16": {"enabled": True}}
    fault = {"submodule": "*.linear_fc1", "phase": "parameter", "rank": 1, "steps": [3, 3]}
    clean = _write(tmp_path, data, "clean", 2, **options)
    harmed = _write(tmp_path, data, "harmed", 2, **options, faults=[fault])
    for config in (clean, harmed):
        results = train_run(config, 2)
        assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(tmp_path / "clean") == []
    assert verdicts_of(tmp_path / "harmed") == [(4, "parameters", 1, "not_reproduced", "master shard", "repair")]
    clean_end, harmed_end = end_of(tmp_path / "clean"), end_of(tmp_path / "harmed")
    assert clean_end[0] == harmed_end[0]


def test_audits_repeat_over_a_resume(tmp_path: Path, data: Path) -> None:
    """A run with audits, dropout and unequal positions of its replicas goes on bit for bit."""
    options = {"model__hidden_dropout": 0.1, "audit": {"enabled": True, "interval": 3}}
    for name in ("whole", "resumed"):
        config = _write(tmp_path, data, name, 2, **options)
        for stop in [4] if name == "resumed" else []:
            train_run(config, 2, f"megasdc.training.stop_step={stop}")
        results = train_run(config, 2)
        assert [code for code, _ in results] == [0, 0], results
    assert end_of(tmp_path / "whole") == end_of(tmp_path / "resumed")
    assert [one["step"] for one in events_of(tmp_path / "resumed", "audit", "agreed")] == [1, 3, 5, 6]


def test_a_checkpoint_written_meanwhile_is_verified_by_the_audit_before(tmp_path: Path, data: Path) -> None:
    """It is whole steps after the audit that has agreed on its step, and no other audit comes."""
    options = {"checkpoint": {"interval": 3, "writing": "async"}, "training__steps": 9, "training__stop_step": None}
    config = _write(tmp_path, data, "run", 2, audit={"enabled": True, "interval": 4}, **options)
    results = train_run(config, 2)
    assert [code for code, _ in results] == [0, 0], results
    marked = {one["step"]: one["audit_step"] for one in events_of(tmp_path / "run", "verify", "checkpoint")}
    agreed = [one["step"] for one in events_of(tmp_path / "run", "audit", "agreed")]
    assert agreed == [1, 4, 8] and marked == {3: 4, 6: 8}
    times = {one.name: one.time for one in read_events(tmp_path / "run", rank=0) if one.step in (3, 4)}
    assert times["agreed"] < times["checkpoint"], "it was not whole yet"


def _records_until_step_3(config: str) -> tuple[int, str | None]:
    """Body of a rank that records no result of later audits."""
    from megasdc.train.detection.step_checker import StepChecker

    record = StepChecker.record_audited

    def record_some(self: Any, address: Any, result: Any) -> None:
        if address.step <= 3:
            record(self, address, result)

    StepChecker.record_audited = record_some  # type: ignore[method-assign]
    return pretrain_rank(config, [])


def test_an_audit_without_records_is_no_agreement(tmp_path: Path, data: Path) -> None:
    """That all replicas lack them alike verifies nothing."""
    config = _write(tmp_path, data, "run", 2)
    results = run_distributed(_records_until_step_3, 2, str(config), init=False)
    assert [code for code, _ in results] == [0, 0], results
    found = [events_of(tmp_path / "run", *name) for name in (("audit", "agreed"), ("sdc", "audit_void"))]
    assert [[one["step"] for one in some] for some in found] == [[1, 2], [4, 6]]
    assert list_steps(tmp_path / "run" / "checkpoints") == [3, 6]
    assert list_verified(tmp_path / "run" / "checkpoints") == []


def test_checks_change_no_bit(tmp_path: Path, data: Path) -> None:
    """The always-on checks alone leave a run as it is without them; bf16, recompute, two tensor ranks."""
    options = {
        "audit": {"enabled": False},
        "parallel__tensor": 2,
        "deepspeed__bf16": {"enabled": True},
        "deepspeed__pipeline": {"activation_checkpoint_interval": 1},
    }
    off = _write(tmp_path, data, "off", 2, **options)
    on = _write(tmp_path, data, "on", 2, **options, sdc={"always_on": {"enabled": True}})
    for config in (off, on):
        results = train_run(config, 4)
        assert [code for code, _ in results if code] == [], results
    assert end_of(tmp_path / "off") == end_of(tmp_path / "on")
    assert verdicts_of(tmp_path / "on") == []


def test_a_warning_of_one_check_hides_no_finding_of_another(tmp_path: Path, data: Path) -> None:
    """With the policy warn, what the recompute check found does not keep the audit of the same step from its own."""
    always = dict.fromkeys(("persistent", "intermittent", "not_reproduced", "inconclusive"), "warn")
    options = {
        "sdc": {"always_on": {"enabled": True, "coverage": "all"}, "policy": always},
        "deepspeed__pipeline": {"activation_checkpoint_interval": 1},
    }
    place = {"steps": [2, 2], "micro_batches": [0], "once": True, "submodule": "*.linear_fc2"}
    faults = [{**place, "rank": 0}, {**place, "rank": 2, "phase": "backward"}]
    results = train_run(_write(tmp_path, data, "run", 3, **options, faults=faults), 3)
    assert [code for code, _ in results] == [0, 0, 0], results
    found = [(one[1], one[2]) for one in verdicts_of(tmp_path / "run") if one[0] == 2]
    assert ("recompute", 0) in found and ("audit", 2) in found
    agreed = [one["step"] for one in events_of(tmp_path / "run", "audit", "agreed")]
    assert agreed == [1, 4, 6], "a step that was committed although it is wrong verifies nothing"
    assert list_steps(tmp_path / "run" / "checkpoints") == [3, 6]
    assert list_verified(tmp_path / "run" / "checkpoints") == [], "nor is anything that holds it verified later"


def test_what_is_covered_is_told_at_the_start(tmp_path: Path, data: Path) -> None:
    """Micro-batches, what is read, and the price in samples; the parameters' bytes are those of the model."""
    config = _write(tmp_path, data, "run", 2, sdc={"always_on": {"enabled": True}}, training={"steps": 1})
    results = train_run(config, 2)
    assert [code for code, _ in results] == [0, 0], results
    ((audit, looks, always_on, cost),) = [one["coverage"] for one in events_of(tmp_path / "run", "start", "checks")]
    assert "every 2 steps: 1 of 2 micro-batches on 2 replicas" in audit and "25.00% of the independent samples" in audit
    h, layers, vocab, positions = 32, 2, 512, 64
    numel = vocab * h + positions * h + layers * (12 * h * h + 13 * h) + 2 * h
    assert f"parameters of 2 replicas (28 results, {4 * numel / 1e6:.3g} MB)" in always_on
    assert re.match(r"every \d+ steps, results of 1 of 2 micro-batches .*NaN and Inf", looks), "of a tiny model"
    every = int(looks.split()[1])
    assert looks.endswith(f"all 2 in turn within {2 * every} steps")
    shares = [float(share) for share in re.findall(r"([0-9.]+)%", cost)]
    assert len(shares) == 4 and shares[1] == 1 and shares[3] == pytest.approx(shares[2] / 2, rel=0.01)


def _asked_for_an_audit(config: str, overrides: list[str]) -> tuple[int, str | None]:
    """A rank; the second one is sent SIGUSR2 when its first step has ended."""
    from megasdc.train.stop import StopWatch

    if os.environ["RANK"] == "1":
        after = StopWatch.after_step

        def once(self: Any, run: Any, result: Any) -> None:
            if result.step == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            after(self, run, result)

        StopWatch.after_step = once  # type: ignore[method-assign]
    return pretrain_rank(config, overrides)


def test_a_signal_asks_for_an_audit(tmp_path: Path, data: Path) -> None:
    """SIGUSR2 to any rank has all ranks audit the step after the one in which they tell each other."""
    config = _write(tmp_path, data, "run", 2, audit={"enabled": True, "interval": 100})
    results = run_distributed(_asked_for_an_audit, 2, str(config), [], init=False)
    assert [code for code, _ in results] == [0, 0], results
    assert [one["step"] for one in events_of(tmp_path / "run", "audit", "agreed")] == [1, 3]


def test_a_rank_that_dies_while_it_repeats_the_work_leaves_nobody_waiting(tmp_path: Path, data: Path) -> None:
    """The flagged rank is killed in its first repeat: the others end with the code for a lost peer; no save.

    It is the rank that otherwise writes for all: the others leave the mark for the next start.
    """
    fault = {"submodule": "*.linear_fc1", "rank": 0, "steps": [2, 2], "micro_batches": [0], "same_elements": True}
    config = _write(tmp_path, data, "run", 3, faults=[fault], parallel={"timeout_s": 20.0})
    results = run_distributed(_dies_in_replay, 3, str(config), [], init=False, expect_exit={0: -9}, grace_s=40.0)
    assert results[0] is None and {results[rank][0] for rank in (1, 2)} <= {75, 79}, results
    assert list((tmp_path / "run" / "checkpoints").glob("step_*")) == []
    assert [one["rank"] for one in events_of(tmp_path / "run", "sdc", "finding")] == [0], "told before the repeats"
    assert "step 2" in str(find_corruption(tmp_path / "run" / "checkpoints")), "a finding that nobody settled counts"


def _dies_in_replay(config: str, overrides: list[str]) -> tuple[int, str | None]:
    """A rank; the first one is killed when it computes a micro-batch again."""
    from megasdc.engine.engine import TrainingEngine

    if os.environ["RANK"] == "0":
        TrainingEngine.recompute_micro_batch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return pretrain_rank(config, overrides)


def test_a_wrong_update_of_a_copy_shows_between_tensor_ranks(tmp_path: Path, data: Path) -> None:
    """All replicas gather the same wrong norm weight; the other tensor rank has another one: found before a commit.

    Nothing repairs it, since the owners' shards differ: a policy of repair looks again, also before a save, and halts.
    """
    options: dict[str, Any] = {"audit": {"enabled": False}, "parallel__tensor": 2}
    fault = {"submodule": "2.layer.input_layernorm", "phase": "update", "slot": "weight.master", "rank": 0}
    fault |= {"kind": "scale", "factor": 2}
    clean = _write(tmp_path, data, "clean", 2, **options, sdc={"always_on": {"enabled": True}})
    assert [code for code, _ in train_run(clean, 4)] == [0, 0, 0, 0]
    for step, actions in ((2, ["halt"]), (2, ["repair", "halt"]), (3, ["repair", "halt"])):
        name = f"step_{step}_{actions[0]}"
        sdc = {"always_on": {"enabled": True, "coverage": "one"}, "policy": {"inconclusive": actions[0]}}
        harmed = _write(tmp_path, data, name, 2, **options, sdc=sdc, faults=[{**fault, "steps": [step, step]}])
        results = train_run(harmed, 4)
        assert [code for code, _ in results] == [73, 73, 73, 73], results
        assert verdicts_of(tmp_path / name) == [
            (step + 1, "copies", None, "inconclusive", "copies on tensor ranks", action) for action in actions
        ]
        assert list((tmp_path / name / "checkpoints").glob("step_*")) == [], "step 3 is the first that is saved"


@pytest.mark.parametrize(("rank", "step"), [(0, 3), (1, 6)])
def test_wrong_parameters_are_not_saved(tmp_path: Path, data: Path, guarded: Path, rank: int, step: int) -> None:
    """Parameters that changed just before a save, also the last one, are gathered again and saved as in a clean run."""
    fault = {"submodule": "*.linear_fc1", "phase": "parameter", "rank": rank, "steps": [step, step]}
    results = train_run(_write(tmp_path, data, "harmed", 2, **GUARDED, faults=[fault]), 2)
    assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(tmp_path / "harmed") == [
        (step + 1, "parameters", rank, "not_reproduced", "master shard", "repair")
    ]
    for saved in (3, 6):
        name = f"step_{saved:08d}"
        states = [state_of(run / "checkpoints" / name) for run in (guarded, tmp_path / "harmed")]
        assert _without_hooks(states[0]) == _without_hooks(states[1])


def _without_hooks(state: dict[str, str]) -> dict[str, str]:
    """What is saved of the model and its optimizer; who was found wrong before is part of the hooks' states."""
    return {key: value for key, value in state.items() if "/hooks/" not in key and "/config/" not in key}


def test_wrong_parameters_halt_before_a_save(tmp_path: Path, data: Path) -> None:
    """With policy halt nothing of that step is kept."""
    options = {"audit": {"enabled": False}, "sdc": {"always_on": {"enabled": True, "coverage": "one"}, "policy": {}}}
    options["sdc"]["policy"] = {"not_reproduced": "halt"}
    fault = {"submodule": "*.linear_fc1", "phase": "parameter", "rank": 1, "steps": [3, 3]}
    harmed = _write(tmp_path, data, "harmed", 2, **options, faults=[fault])
    results = train_run(harmed, 2)
    assert [code for code, _ in results] == [73, 73], results
    assert list((tmp_path / "harmed" / "checkpoints").glob("step_*")) == []


BF16_SUMS = {"deepspeed__bf16": {"enabled": True}, "deepspeed__data_types": {"grad_accum_dtype": "bf16"}}
EXTRA: dict[str, Any] = {"audit": {"enabled": True, "interval": 2, "micro_batch": "extra"}}


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, {"parallel__tensor": 2, "deepspeed__bf16": {"enabled": True}}),
        (4, {"parallel__pipeline": 2, "deepspeed__pipeline": {"activation_checkpoint_interval": 1}}),
        pytest.param(2, {"audit__permuted": True, **BF16_SUMS}, marks=pytest.mark.full),
    ],
    ids=["tp2dp2_bf16", "pp2dp2_fp32_recompute", "dp2_permuted_bf16_sums"],
)
def test_audits_of_extra_micro_batches_change_no_bit(
    tmp_path: Path, data: Path, ranks: int, changes: dict[str, Any]
) -> None:
    """With dropout: checkpoints, with random states and places in the data, and metrics are those of a run without."""
    changes = {**changes, "model__hidden_dropout": 0.1}
    plain = {key: value for key, value in changes.items() if not key.startswith("audit__")}
    for name, sections in {"off": {"audit__enabled": False, **plain}, "on": {**EXTRA, **changes}}.items():
        results = train_run(_write(tmp_path, data, name, 2, **sections), ranks)
        assert [code for code, _ in results if code] == [], results
    assert end_of(tmp_path / "off") == end_of(tmp_path / "on")
    audits = [(one["step"], one["micro_batch_of"]) for one in events_of(tmp_path / "on", "audit", "agreed")]
    assert audits == [(step, "extra") for step in (1, 2, 4, 6)] and verdicts_of(tmp_path / "on") == []


def test_the_first_step_after_a_resume_is_audited_and_changes_no_bit(tmp_path: Path, data: Path) -> None:
    """A fault that repeats itself is found there, long before the next audit; without it the bits stay."""
    options = {"model__hidden_dropout": 0.1, "audit": {"enabled": True, "interval": 6}}
    for name in ("whole", "resumed"):
        config = _write(tmp_path, data, name, 2, **options)
        for stop in [3] if name == "resumed" else []:
            train_run(config, 2, f"megasdc.training.stop_step={stop}")
        results = train_run(config, 2)
        assert [code for code, _ in results] == [0, 0], results
    assert end_of(tmp_path / "whole") == end_of(tmp_path / "resumed")
    audits = [(one["step"], one["micro_batch_of"]) for one in events_of(tmp_path / "resumed", "audit", "agreed")]
    assert audits == [(1, "extra"), (4, "extra"), (6, "training")]
    fault = {"submodule": "*.linear_fc1", "rank": 1, "steps": [4, 5], "same_elements": True, "bits": "exponent"}
    harmed = _write(tmp_path, data, "harmed", 2, **options, faults=[fault])
    train_run(harmed, 2, "megasdc.training.stop_step=3")
    assert [code for code, _ in train_run(harmed, 2)] == [73, 73]
    assert [one[:3] for one in verdicts_of(tmp_path / "harmed")] == [(4, "audit", 1)]
    (page,) = (tmp_path / "harmed" / "reports").glob("incident_step_00000004.html")
    assert "Step 4, the extra micro-batch of the audit: rank 1" in page.read_text()
    assert "micro-batch 0" not in page.read_text()
    (found,) = events_of(tmp_path / "harmed", "sdc", "verdict")
    assert "step 4, the extra micro-batch of the audit, " in str(found)


def test_what_a_run_ends_with_is_audited(tmp_path: Path, data: Path) -> None:
    """A fault that begins after the last step ends the run, and its last checkpoint stays a candidate; the next start
    goes back to the one before, and its own last one is verified.
    """
    fault = {"submodule": "*.linear_fc1", "rank": 1, "steps": [7, 7], "same_elements": True, "bits": "exponent"}
    audit = {"enabled": True, "interval": 100, "verify_checkpoints": True}
    harmed = _write(tmp_path, data, "run", 2, audit=audit, faults=[fault])
    assert [code for code, _ in train_run(harmed, 2)] == [73, 73]
    assert [one[:3] for one in verdicts_of(tmp_path / "run")] == [(7, "audit", 1)]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (list_steps(checkpoints), list_verified(checkpoints)) == ([3, 6], [3])
    assert [code for code, _ in train_run(_write(tmp_path, data, "run", 2, audit=audit), 2)] == [0, 0]
    assert (list_steps(checkpoints), list_verified(checkpoints)) == ([3, 6], [3, 6])
    audits = [(one["step"], one["micro_batch_of"]) for one in events_of(tmp_path / "run", "audit", "agreed")]
    assert audits == [(1, "extra"), (4, "training"), (4, "training"), (7, "extra")]
