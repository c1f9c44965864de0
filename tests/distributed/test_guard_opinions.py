"""Does a guard name the wrong one of two replicas by the referee, and a wrong unit of one device by itself?"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_distributed

import megasdc
from megasdc.events import read_events
from megasdc.sdc.incident import load_incidents
from tools.trainings.broken_unit import BrokenUnit
from tools.trainings.engines import PERSISTENT, Planted, deepspeed_config, llama_engine, pipeline_engine, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def _guarded(folder: str, planted: Planted, precision: str, sdc: dict[str, Any], more: dict[str, Any]) -> int:
    """Body of a rank: train with a guard; the exit code."""
    here = planted if planted.rank == dist.get_rank() else None
    config = deepspeed_config(1, "fp32" if precision == "autocast" else precision)
    if precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    of_pipeline = planted.submodule.isdecimal()
    engine = pipeline_engine(config, 2, here) if of_pipeline else llama_engine(config, here, **more)
    guard = megasdc.attach(engine, {"logging": {"run_dir": folder}, "audit": {"interval": 2}, "sdc": sdc})
    try:
        train(engine, 2, guard.dims.dp_rank)
    except SystemExit as error:
        return int(str(error.code))
    finally:
        guard.close()
    return 0


@pytest.mark.parametrize(
    ("rank", "submodule", "phase", "precision", "more"),
    [
        (0, "model.layers.1.mlp.up_proj", "forward", "fp32", {}),
        (1, "model.layers.0.self_attn.q_proj", "backward", "bf16", {"attention_bias": True}),
        (0, "lm_head", "weight_grad", "fp32", {}),
        (1, "model.layers.0.mlp.down_proj", "forward", "autocast", {}),
        (0, "model.layers.0.mlp.down_proj", "backward", "autocast", {"mlp_bias": True}),
        (1, "model.layers.0.self_attn.o_proj", "weight_grad", "autocast", {}),
        (0, "model.embed_tokens", "weight_grad", "fp32", {"tie_word_embeddings": True}),
        (1, "model.layers.0.self_attn", "forward", "bf16", {}),
        (1, "6", "backward", "fp32", {}),
    ],
    ids=str,
)
def test_of_two_replicas_the_wrong_one_is_named(
    tmp_path: Path, rank: int, submodule: str, phase: str, precision: str, more: dict[str, Any]
) -> None:
    """By the referee, in any direction, whichever it is; the report has its opinion."""
    basis = "own code in fp64" if submodule.endswith("self_attn") else "referee"
    stages = 2 if submodule.isdecimal() else 1
    place = rank + 2 * (stages - 1)
    where = (4, "row") if submodule.endswith("self_attn") else ()  # an estimate needs elements on which both agree
    planted = Planted(place, submodule, phase, PERSISTENT, *where)
    assert run_distributed(_guarded, 2 * stages, str(tmp_path), planted, precision, {}, more) == [73] * 2 * stages
    ((page, incident),) = load_incidents(tmp_path / "reports", [])
    (flagged,) = incident.flagged
    assert (flagged.rank, flagged.first.fqn, flagged.first.phase) == (place, submodule, phase)
    assert (incident.verdict, incident.basis, incident.disputed) == ("persistent", basis, ())
    (opinion,) = incident.opinions
    assert opinion.within == {place: False, place + 1 - 2 * rank: True} and opinion.worst is not None
    (event,) = read_events(tmp_path, kind="sdc", name="referee")
    assert event.fields["reason"] == "" and event.fields["basis"] == basis and "fp64" in (text := page.read_text())
    assert ("rounding is estimated to make" in text) == (basis != "referee")


def test_where_the_referee_is_not_asked_nobody_is_named(tmp_path: Path) -> None:
    """Two replicas differ, and each repeats its own."""
    planted = Planted(1, "lm_head", "forward", PERSISTENT)
    assert run_distributed(_guarded, 2, str(tmp_path), planted, "fp32", {"referee": False}, {}) == [73] * 2
    ((_, incident),) = load_incidents(tmp_path / "reports", [])
    assert (incident.verdict, incident.flagged, len(incident.disputed)) == ("inconclusive", (), 2)
    assert not list(read_events(tmp_path, kind="sdc", name="referee"))


# --- one device -------------------------------------------------------------------------------------------------------

K_PROJ, HEAD = (None, 32, 16), (None, 32, 64)
"""Sizes of products that are first in these layers: of the output, by hidden size, key heads and vocabulary."""


def _with_broken_unit(folder: str, sizes: Any, permuted: bool, late: bool, factor: float = 1.5) -> int:
    """Body of a rank: train with a unit of rank 0 that is wrong, after two steps if ``late``; the exit code."""
    engine = llama_engine(deepspeed_config(1, "fp32"))
    guard = megasdc.attach(engine, {"logging": {"run_dir": folder}, "audit": {"interval": 3, "permuted": permuted}})
    try:
        if late:
            train(engine, 2, guard.dims.dp_rank)
        with BrokenUnit(sizes, (3, 5), factor) if dist.get_rank() == 0 else nullcontext():
            train(engine, 2, guard.dims.dp_rank)
    except SystemExit as error:
        return int(str(error.code))
    finally:
        guard.close()
    return 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("sizes", "fqn", "phase"),
    [
        (K_PROJ, "model.layers.0.self_attn.k_proj", "forward"),
        ((None, 64, 32), "lm_head", "backward"),
        ((64, None, 32), "lm_head", "weight_grad"),
    ],
    ids=["forward", "backward", "weight_grad"],
)
def test_a_wrong_unit_of_the_only_replica_is_found(
    tmp_path: Path, sizes: Any, fqn: str, phase: str, late: bool
) -> None:
    """From the first audit on, which tries the operations, or later; without permuted audits it is not seen."""
    folder, unseen = tmp_path / "permuted", tmp_path / "unseen"
    assert run_distributed(_with_broken_unit, 1, str(folder), sizes, True, late) == [73]
    ((page, incident),) = load_incidents(folder / "reports", [])
    (flagged,) = incident.flagged
    assert (flagged.rank, flagged.first.fqn, flagged.first.phase) == (0, fqn, phase)
    found = incident.tier, incident.verdict, incident.basis, incident.step
    assert found == ("permuted", "persistent", "own results elsewhere", 3 if late else 1)
    assert "elements in other places" in page.read_text()
    (tried,) = read_events(folder, kind="audit", name="permuted")
    assert tried.step == 1 and tried.fields["not_kept"] == {} and sum(tried.fields["moved"].values()) > 40
    assert run_distributed(_with_broken_unit, 1, str(unseen), sizes, False, late) == [0]
    assert not (unseen / "reports").exists()


def test_another_order_of_summation_is_no_finding(tmp_path: Path) -> None:
    """Of a kernel whose results were equal by chance in the first audit; its operation is not moved from then on."""
    assert run_distributed(_with_broken_unit, 1, str(tmp_path), HEAD, True, True, 1 + 2.0**-20) == [0]
    assert not (tmp_path / "reports").exists()
    first, again = read_events(tmp_path, kind="audit", name="permuted")
    assert (first.step, first.fields["not_kept"], again.step) == (1, {}, 3)
    (signature,) = again.fields["not_kept"]
    assert signature.startswith("aten::mm float32(32, 32) float32(32, 64)")
    assert [one.step for one in read_events(tmp_path, kind="audit", name="agreed")] == [1, 3]


def test_of_two_replicas_a_wrong_unit_is_named_by_itself_and_by_the_other(tmp_path: Path) -> None:
    """Where the training goes on both findings are told, each in every audit, and no other rank is named."""
    assert run_distributed(_with_unit_of_two, 2, str(tmp_path)) == [0, 0]
    verdicts = [(one.step, one.fields) for one in read_events(tmp_path, kind="sdc", name="verdict")]
    told = [(step, found["tier"], found["rank"], found["verdict"], found["basis"]) for step, found in verdicts]
    both = (("permuted", 0, "persistent", "own results elsewhere"), ("audit", 0, "persistent", "referee"))
    assert told == [(step, *found) for step in (1, 2) for found in both]


def _with_unit_of_two(folder: str) -> int:
    """Body of a rank: train with a unit of rank 0 that is wrong, and go on; how many audits agreed."""
    engine = llama_engine(deepspeed_config(1, "bf16"))
    sdc = {"policy": {"persistent": "warn"}, "repeats": 2}
    settings = {"logging": {"run_dir": folder}, "audit": {"interval": 1, "permuted": True}, "sdc": sdc}
    guard = megasdc.attach(engine, settings)
    with BrokenUnit(HEAD, (3, 5)) if dist.get_rank() == 0 else nullcontext():
        train(engine, 2, guard.dims.dp_rank)
    guard.close()
    return guard.audits - 2
