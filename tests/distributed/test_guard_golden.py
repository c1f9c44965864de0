"""Does a guard find with a golden trace what all replicas compute alike, and refuse what it does not hold for?"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed

import megasdc
from megasdc.common.errors import ConfigError, MegasdcError, TraceError
from megasdc.events import read_events
from megasdc.sdc.incident import load_incidents
from tools.trainings.engines import PERSISTENT, Planted, deepspeed_config, llama_engine, pipeline_engine, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
STEPS = 4


def _settings(folder: Path | str, golden: Path | str, **fields: Any) -> dict[str, Any]:
    path = str(golden)
    return {
        "logging": {"run_dir": str(folder)},
        "audit": {"enabled": False},
        "golden": {"path": path, "interval": 2, **fields},
    }


def _engine(stages: int, precision: str = "fp32", planted: Planted | None = None, **fields: Any) -> Any:
    if stages > 1:
        return pipeline_engine(deepspeed_config(1, precision), stages, planted)
    zero = int(precision != "fp32")  # without ZeRO the optimizer steps from what parameters hold
    return llama_engine(deepspeed_config(zero, precision), planted, **{"attention_dropout": 0.1, **fields})


def _trained(
    folder: str, golden: str, record: bool, stages: int, wrong: tuple[int, ...] = (), submodule: str = ""
) -> tuple[int, list[float], float]:
    """Body of a rank: train with a golden file, some ranks wrong; exit code, losses, and a number drawn afterwards."""
    rank = dist.get_rank()
    engine = _engine(stages, planted=Planted(rank, submodule, "forward", PERSISTENT) if rank in wrong else None)
    torch.manual_seed(5 + rank)
    guard = megasdc.attach(engine, _settings(folder, golden, record=record)) if folder else None
    losses: list[float] = []
    code = 0
    try:
        losses = train(engine, STEPS, rank)
    except SystemExit as error:
        code = int(str(error.code))
    if guard is not None:
        guard.close()
    return code, losses, torch.rand(1).item()


@pytest.mark.parametrize(("stages", "submodule"), [(1, "model.layers.1.mlp.up_proj"), (2, "6")], ids=["llama", "pipe"])
def test_what_all_replicas_have_in_common_is_found(tmp_path: Path, stages: int, submodule: str) -> None:
    """And one of three is named; training has, bit for bit, what it has without, while recording and verifying."""
    file = str(tmp_path / "trusted.golden")
    recorded = run_distributed(_trained, stages, str(tmp_path / "record"), file, True, stages)
    assert recorded == run_distributed(_trained, stages, "", file, False, stages)
    (event,) = read_events(tmp_path / "record", kind="golden")
    assert (event.name, event.step, event.fields["path"]) == ("recorded", 1, file) and event.fields["results"] > 8

    ranks = 3 * stages
    clean = run_distributed(_trained, ranks, str(tmp_path / "clean"), file, False, stages)
    assert clean == run_distributed(_trained, ranks, "", file, False, stages)
    events = list(read_events(tmp_path / "clean", kind="golden", name="agreed"))
    assert [one.step for one in events] == [1, 2, 4] and all(one.fields["compared"] > 24 for one in events)

    everywhere = tuple(range(ranks))[-3:]  # all ranks of the last stage
    for name, wrong in (("all", everywhere), ("one", everywhere[1:2])):
        found = run_distributed(_trained, ranks, str(tmp_path / name), file, False, stages, wrong, submodule)
        assert [code for code, _, _ in found] == [73] * ranks
        ((page, incident),) = load_incidents(tmp_path / name / "reports", [])
        assert (incident.tier, incident.basis, incident.verdict) == ("golden", "golden trace", "persistent")
        assert incident.step == 1 and tuple(one.rank for one in incident.flagged) == wrong
        assert {(one.first.fqn, one.first.phase) for one in incident.flagged} == {(submodule, "forward")}
        assert "golden" in page.read_text()


def _refusals(folder: str, golden: str) -> list[str]:
    """Body of a rank: what is said of each mistake; then two trainings, one after another, in good order."""
    said = []

    def refused(kind: type[MegasdcError], settings: dict[str, Any], engine: Any) -> None:
        with pytest.raises(kind) as caught:
            megasdc.attach(engine, settings)
        said.append(str(caught.value))

    engine = _engine(1)
    refused(TraceError, _settings(folder, golden), engine)
    guard = megasdc.attach(engine, _settings(folder, golden, record=True))
    train(engine, 1, dist.get_rank())
    guard.close()
    refused(ConfigError, _settings(folder, golden, record=True), engine)
    refused(TraceError, _settings(folder, golden), _engine(1, "bf16"))
    refused(TraceError, _settings(folder, golden), _engine(1, intermediate_size=56))
    refused(TraceError, _settings(folder, golden, seed=3), engine)
    refused(TraceError, {**_settings(folder, golden), "audit": {"enabled": False, "submodules": ["*.mlp.*"]}}, engine)
    damaged = Path(f"{golden}.damaged")
    if dist.get_rank() == 1:
        damaged.write_bytes(Path(golden).read_bytes()[:-100])
    dist.barrier()
    refused(TraceError, _settings(folder, damaged), engine)
    engine.module.model.layers[0].self_attn.eval()
    guard = megasdc.attach(engine, _settings(folder, golden))
    with pytest.raises(TraceError) as caught:
        train(engine, 1, dist.get_rank())
    said.append(str(caught.value))
    guard.close()
    return said


def test_what_a_file_does_not_hold_for_is_refused(tmp_path: Path) -> None:
    """With every difference and what to do, on all ranks alike."""
    golden = tmp_path / "trusted.golden"
    wanted = [
        ("rank 0 on ", f"{golden} does not exist; record one on trusted hardware", "golden.record true"),
        ("golden.record: got true", f'sdc.golden "{golden}" exists', "remove it"),
        ("precision: golden 'fp32', here 'bf16'", "lm_head.weight: golden '[64, 32] torch.float32', here"),
        (
            "config.intermediate_size: golden 48, here 56",
            "submodule.model.layers.0.mlp.up_proj: golden 'Linear(in_features=32, out_features=48, bias=False)'",
        ),
        ("seed: golden 1234, here 3", "set sdc.golden to null"),
        ("watched.lm_head: golden True, here None",),
        ("damaged",),
        ("model.layers.0.self_attn was in training mode", "record it again"),
    ]
    for said in run_distributed(_refusals, 2, str(tmp_path / "run"), str(golden)):
        assert len(said) == len(wanted)
        for text, parts in zip(said, wanted, strict=True):
            assert all(part in text for part in parts), text
    with zipfile.ZipFile(golden) as archive:
        assert set(archive.namelist()) == {
            "header.json",
            "stage_000/tensor_000.batch",
            "stage_000/tensor_000.arrow",
        }
