"""Does a guard name the wrong one of two replicas by the referee, and a wrong unit of one device by itself?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_distributed

import megasdc
from megasdc.events import read_events
from megasdc.sdc.incidents.incident import load_incidents
from tools.bench.guard.trainings import PERSISTENT, Planted, deepspeed_config, llama_engine, pipeline_engine, train

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
        (0, "model.embed_tokens", "forward", "fp32", {}),
        (1, "6", "backward", "fp32", {}),
    ],
    ids=str,
)
def test_of_two_replicas_the_wrong_one_is_named(
    tmp_path: Path, rank: int, submodule: str, phase: str, precision: str, more: dict[str, Any]
) -> None:
    """By the referee, in any direction, whichever it is; the report has its opinion."""
    stages = 2 if submodule.isdecimal() else 1
    place = rank + 2 * (stages - 1)
    planted = Planted(place, submodule, phase, PERSISTENT)
    assert run_distributed(_guarded, 2 * stages, str(tmp_path), planted, precision, {}, more) == [73] * 2 * stages
    ((page, incident),) = load_incidents(tmp_path / "reports", [])
    (flagged,) = incident.flagged
    assert (flagged.rank, flagged.first.fqn, flagged.first.phase) == (place, submodule, phase)
    assert (incident.verdict, incident.basis, incident.disputed) == ("persistent", "referee", ())
    (opinion,) = incident.opinions
    assert opinion.within == {place: False, place + 1 - 2 * rank: True} and opinion.worst is not None
    (event,) = read_events(tmp_path, kind="sdc", name="referee")
    assert event.fields["reason"] == "" and "fp64" in page.read_text()


def test_what_the_referee_does_not_decide_names_nobody(tmp_path: Path) -> None:
    """It is not asked, or the gradient is a sum: of a weight that is tied."""
    planted = Planted(1, "lm_head", "forward", PERSISTENT)
    tied = Planted(1, "model.embed_tokens", "weight_grad", PERSISTENT)
    off, on = {"referee": False}, {}
    for name, fault, sdc, more in (("off", planted, off, {}), ("tied", tied, on, {"tie_word_embeddings": True})):
        folder = tmp_path / name
        assert run_distributed(_guarded, 2, str(folder), fault, "fp32", sdc, more) == [73] * 2
        ((_, incident),) = load_incidents(folder / "reports", [])
        assert (incident.verdict, incident.flagged, len(incident.disputed)) == ("inconclusive", (), 2)
        reasons = [one.fields["reason"] for one in read_events(folder, kind="sdc", name="referee")]
        assert [one[:34] for one in reasons] == ([] if name == "off" else ["ranks [0, 1] did not repeat their "])
