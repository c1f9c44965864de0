"""Are traces of layouts equal exactly where the table says, and is a changed result named by the tool's comparison?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_distributed
from megatron.core import parallel_state
from tiny import GLOBAL_BATCH, GPT, LLAMA, SEQUENCE, make_engine, micro_batches, train_steps

from megasdc.common.addresses import (
    BACKWARD,
    FORWARD,
    MICRO_BATCH_PHASES,
    PHASES,
    RECOMPUTE,
    REDUCED_GRAD,
    REPLICA_PHASES,
    Address,
)
from megasdc.common.errors import TraceError
from megasdc.config.model import ModelSection
from megasdc.config.sections import TraceSection
from megasdc.engine.observer import Observer
from megasdc.lab.traces.traces import RunTraces, compare_traces_of_runs, load_traces
from megasdc.model.kinds import submodule_kind
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.cost import RankWork, reads_of_step
from megasdc.sdc.trace import LAYOUT_FREE, Trace, TraceWriter, compare_across_layouts, trace_path
from megasdc.sdc.tracer import Tracer, choose_submodules
from megasdc.tensors.checksum import algorithm

pytestmark = pytest.mark.distributed

NAME = "xxh3_64.v1"
RECOMPUTED = {"pipeline": {"activation_checkpoint_interval": 1}}


def _header(layout: dict[str, int], sequence_parallel: bool = False) -> dict[str, Any]:
    return {
        "layout": layout,
        "sequence_parallel": sequence_parallel,
        "micro_batch_size": 1,
        "accumulation_steps": GLOBAL_BATCH // layout["data"],
        "precision": "fp32",
        "algorithm": NAME,
        **TraceSection().model_dump(mode="json", exclude={"enabled", "algorithm"}),
    }


def _record(model: dict[str, Any], tensor: int, pipeline: int, steps: int = 1, **options: Any) -> list[Trace]:
    """Traces of all ranks over some steps."""
    engine = make_engine(model, tensor, pipeline, **options)
    tracer = Tracer(algorithm(NAME), TraceSection())
    observer = Observer(engine, list_submodules(engine.module), [tracer])
    train_steps(engine, 1, steps)
    observer.close()
    return gather_objects(tracer.pop_trace())


def _run(model: dict[str, Any], layout: tuple[int, int, int], **options: Any) -> RunTraces:
    tensor, pipeline, data = layout
    world = tensor * pipeline * data
    traces = run_distributed(_record, world, model, tensor, pipeline, **options)[0]
    header = _header({"tensor": tensor, "pipeline": pipeline, "data": data}, options.get("sequence_parallel", False))
    return RunTraces(str(layout), dict.fromkeys(range(world), header), dict(enumerate(traces)))


def _difference(expected: RunTraces, got: RunTraces, monkeypatch: Any) -> tuple[Counter[Any], Counter[Any]]:
    """Results that were compared and that differ, by (phase, kind), of everything that has a counterpart."""
    kinds = frozenset(submodule_kind(address.fqn) for trace in got.traces.values() for address in trace.addresses)
    monkeypatch.setattr("megasdc.sdc.trace.free_kinds", lambda *_: dict.fromkeys(PHASES, kinds))
    one = compare_across_layouts(expected.traces, got.traces, expected.header, got.header)[0]
    monkeypatch.undo()
    wrong = Counter((d.address.phase, submodule_kind(d.address.fqn)) for d in one.divergences)
    held = Counter((a.phase, submodule_kind(a.fqn)) for trace in got.traces.values() for a in trace.addresses)
    return held, wrong


DIMENSIONS = {"pipeline": (1, 2, 1), "data": (1, 1, 2), "tensor": (2, 1, 1)}
STYLES = {"gpt": GPT, "llama": LLAMA, "llama_bf16": LLAMA}


@pytest.mark.parametrize("style", STYLES)
def test_the_table_is_what_is_free_of_the_layout(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lists is bit-equal between one rank and two in each dimension; what it leaves out differs.

    Left out although it is equal here: what hangs on the shard that a rank owns, and tied weights of other models.
    """
    options: dict[str, Any] = {"deepspeed": RECOMPUTED}
    if style.endswith("bf16"):
        options["precision"] = "bf16"
    one = _run(STYLES[style], (1, 1, 1), **options)
    for dimension, layout in DIMENSIONS.items():
        other = _run(STYLES[style], layout, **options)
        table = LAYOUT_FREE[dimension]
        held, wrong = _difference(one, other, monkeypatch)
        for phase, kind in held:
            listed = kind in table.get(phase, ())
            if listed:
                assert not wrong[phase, kind], (dimension, phase, kind)
            elif dimension != "pipeline" and phase in (FORWARD, BACKWARD):
                assert wrong[phase, kind], (dimension, phase, kind)
        if dimension == "pipeline":
            left_out = {key for key in held if key[0] in REPLICA_PHASES and key[1] not in table[key[0]]}
            accumulated = {("accumulated_grad", "embedding"), ("accumulated_grad", "head")}
            assert left_out == {("weight_grad", "embedding"), *accumulated}
        for pair in ((one, other), (other, one)):
            assert compare_traces_of_runs(*pair, cross_layout=True).same


def test_a_tied_embedding_is_not_in_the_table_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is another one where the output has a stage of its own."""
    one, two = _run(GPT, (1, 1, 1)), _run(GPT, (1, 2, 1))
    wrong = _difference(one, two, monkeypatch)[1]
    assert set(wrong) >= {("weight_grad", "embedding"), ("reduced_grad", "embedding")}
    assert not [key for key in wrong if key[0] in MICRO_BATCH_PHASES and key != ("weight_grad", "embedding")]


def test_later_steps_are_not_free_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second step weights have parted, so that across layouts one step is compared."""
    one, two = (_run(GPT, layout, steps=2) for layout in ((1, 1, 1), (1, 2, 1)))
    assert compare_traces_of_runs(one, two, cross_layout=True).steps == [1]
    second = [
        RunTraces(run.path, run.headers, {rank: _of_step(trace, 2) for rank, trace in run.traces.items()})
        for run in (one, two)
    ]
    assert len(compare_traces_of_runs(*second, cross_layout=True).comparison.divergences) > 100


def _of_step(trace: Trace, step: int) -> Trace:
    pairs = [pair for pair in zip(trace.addresses, trace.checksums, strict=True) if pair[0].step == step]
    return Trace([address for address, _ in pairs], [value for _, value in pairs])


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_all_three_dimensions_at_once(model: dict[str, Any]) -> None:
    """2x2x2 ranks agree with one in what is free of all three; sequence parallelism leaves nothing to compare."""
    one, eight = _run(model, (1, 1, 1)), _run(model, (2, 2, 2))
    report = compare_traces_of_runs(one, eight, cross_layout=True)
    assert report.same
    # Positions of 4 samples on each of 4 ranks of the first stage.
    assert report.comparison.compared == 4 * 4
    three = _run(model, (1, 2, 2), steps=1)
    assert compare_traces_of_runs(eight, three, cross_layout=True).comparison.compared == 4 * 4
    assert compare_traces_of_runs(one, three, cross_layout=True).comparison.compared > 8 * 40
    split = _run(model, (2, 1, 1), sequence_parallel=True)
    with pytest.raises(TraceError, match="no result in common"):
        compare_traces_of_runs(one, split, cross_layout=True)


def test_a_changed_result_is_found_across_layouts() -> None:
    """A wrong result of replica 1 at 1x2x2 is named with its own rank, and with the one that computed it alone."""
    one, four = _run(LLAMA, (1, 1, 1)), _run(LLAMA, (1, 2, 2))
    rank = 3
    trace = four.traces[rank]
    place = next(i for i, a in enumerate(trace.addresses) if a.phase == FORWARD and a.micro_batch == 2)
    trace.checksums[place] ^= 1
    (found,) = compare_traces_of_runs(one, four, cross_layout=True).comparison.first
    assert (found.rank, found.against, found.address) == (rank, 0, trace.addresses[place])


def _swapped(swap: bool) -> Any:
    """One step at two replicas; with ``swap`` each gets the micro-batches of the other."""
    engine = make_engine(GPT, 1, 1, deepspeed=RECOMPUTED)
    tracer = Tracer(algorithm(NAME), TraceSection())
    observer = Observer(engine, list_submodules(engine.module), [tracer])
    dims = engine.dims
    place = {"swapped": type(dims)(dims.tensor, dims.pipeline, dims.data, 1 - dims.rank)}
    batches = list(micro_batches(engine, 1))
    if swap:
        engine.dims = place["swapped"]
        batches = list(micro_batches(engine, 1))
        engine.dims = dims
    engine.train_step(iter(batches))
    observer.close()
    return gather_objects(tracer.pop_trace())


def test_the_replica_does_not_matter() -> None:
    """With the samples of two replicas exchanged, each computes what the other did, up to the reduced gradients."""
    plain, swapped = (run_distributed(_swapped, 2, swap)[0] for swap in (False, True))
    for rank in (0, 1):
        ours, theirs = (
            {a: c for a, c in zip(t.addresses, t.checksums, strict=True) if a.phase in MICRO_BATCH_PHASES}
            for t in (plain[rank], swapped[1 - rank])
        )
        assert ours == theirs and {a.phase for a in ours} == set(MICRO_BATCH_PHASES)
        # A sum of two has one order only: each rank's own shard comes out the same.
        assert [c for a, c in _pairs(plain[rank]) if a.phase == REDUCED_GRAD] == [
            c for a, c in _pairs(swapped[rank]) if a.phase == REDUCED_GRAD
        ]
    assert plain[0].checksums != plain[1].checksums


def _pairs(trace: Trace) -> Any:
    return zip(trace.addresses, trace.checksums, strict=True)


def _write_with_change(folder: str, model: dict[str, Any], phase: str | None, fqn: str, wrong_rank: int) -> None:
    """Two steps at TP=2, one element of one result changed on one rank, the trace written as a run's is."""
    parallel_state.destroy_model_parallel()
    engine = make_engine(model, 2, 1, deepspeed=RECOMPUTED)
    rank = dist.get_rank()

    def change(address: Address, result: Any) -> Any:
        at = (address.phase, address.fqn, address.step, address.micro_batch)
        if rank != wrong_rank or at != (phase, fqn, 2, 3):
            return None
        wrong = result.clone()
        wrong.view(-1)[5] += 0.5
        return wrong

    tracer = Tracer(algorithm(NAME), TraceSection())
    observer = Observer(engine, list_submodules(engine.module), [change, tracer])
    writer = TraceWriter(trace_path(Path(folder), rank, 1), {**_header(engine.dims.layout), "rank": rank})
    for step in (1, 2):
        train_steps(engine, step, 1)
        writer.append(tracer.pop_trace())
    observer.close()
    writer.close()


@pytest.mark.parametrize("model", [GPT, pytest.param(LLAMA, marks=pytest.mark.full)], ids=["gpt", "llama"])
def test_a_changed_result_of_one_tensor_rank_is_named(tmp_path: Path, model: dict[str, Any]) -> None:
    """Forward, recomputation, backward and weight gradient: rank, submodule and direction are those of the change.

    The other tensor rank gets the wrong values through the next sum; it comes later.
    """
    run_distributed(_write_with_change, 2, str(tmp_path / "clean"), model, None, "", 0)
    clean = load_traces(tmp_path / "clean")
    cases = [
        (FORWARD, "4.layer.mlp.linear_fc2", 1),
        (FORWARD, "3.layer.self_attention.linear_qkv", 0),
        (RECOMPUTE, "3.layer.mlp.activation", 1),
        (BACKWARD, "3.layer.mlp.linear_fc1", 1),
        (BACKWARD, "5.layer.self_attention.core_attention", 0),
        ("weight_grad", "2.layer.self_attention.linear_proj", 1),
    ]
    for number, (phase, fqn, rank) in enumerate(cases):
        folder = tmp_path / f"wrong{number}"
        run_distributed(_write_with_change, 2, str(folder), model, phase, fqn, rank)
        report = compare_traces_of_runs(clean, load_traces(folder))
        first = report.comparison.first[0]
        assert len(report.comparison.first) == 1
        got = (first.rank, first.address.step, first.address.micro_batch, first.address.phase, first.address.fqn)
        assert got == (rank, 2, 3, phase, fqn)
        if phase == FORWARD and "fc2" in fqn:
            assert set(report.comparison.counts) == {0, 1}


def _read_by_phase(model: dict[str, Any], tensor: int, granularity: str, precision: str) -> dict[str, tuple[int, int]]:
    engine = make_engine(model, tensor, 1, precision=precision, deepspeed=RECOMPUTED)
    chosen = choose_submodules(list_submodules(engine.module), granularity, None)
    found = dict.fromkeys(PHASES, (0, 0))

    def count(address: Address, result: Any) -> None:
        number, size = found[address.phase]
        found[address.phase] = number + 1, size + result.numel() * result.element_size()

    observer = Observer(engine, chosen, [count])
    train_steps(engine, 1, 1)
    observer.close()
    return found


COSTS = [
    (GPT, 1, "gemm", "fp32"),
    (GPT, 2, "submodule", "bf16"),
    (LLAMA, 2, "gemm", "bf16"),
    (LLAMA, 1, "layer", "fp32"),
    ({**LLAMA, "num_query_groups": 4, "tie_embeddings": True, "qkv_bias": True}, 1, "gemm", "fp32"),
]


@pytest.mark.parametrize(("model", "tensor", "granularity", "precision"), COSTS)
def test_the_cost_model_counts_what_a_trace_reads(
    model: dict[str, Any], tensor: int, granularity: str, precision: str
) -> None:
    """Number and bytes of all results of a step are exactly those of the formulas, in every phase."""
    found = run_distributed(_read_by_phase, tensor, model, tensor, granularity, precision)[0]
    work = RankWork(
        ModelSection(**model),
        vocab=256,
        sequence=SEQUENCE,
        micro_batch=1,
        accumulation=GLOBAL_BATCH,
        tensor=tensor,
        width_bytes=4 if precision == "fp32" else 2,
        recompute=True,
    )
    assert found == {phase: (r.count, r.bytes) for phase, r in reads_of_step(work, granularity).items()}
