"""Is exactly what a spec says harmed, in every phase, and does the injector tell exactly that?"""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from megatron.core import parallel_state
from tiny import GPT, LLAMA, SEQUENCE, VOCAB, make_engine, micro_batches, train_steps

from megasdc.common.addresses import PHASES as ADDRESSED
from megasdc.common.addresses import Address
from megasdc.config.contradictions import submodule_slots
from megasdc.config.faults import FaultSpec
from megasdc.config.model import ModelSection
from megasdc.config.sections import ParallelSection
from megasdc.data.loader import MemoryStream, MicroBatchLoader
from megasdc.engine.hooks import Hook, Run, RunProgress
from megasdc.engine.observer import Observer
from megasdc.events import EventLog
from megasdc.faults.injector import Injector, faulty_submodules
from megasdc.faults.stored import FaultyBatches, StateFaults
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import accumulated_gradient, owned_fragments
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.train.main import train_step

pytestmark = pytest.mark.distributed

FC1 = "3.layer.mlp.linear_fc1"
STEPS = 2
PHASES: list[dict[str, Any]] = [
    {"phase": "forward", "micro_batches": [1]},
    {"phase": "recompute", "micro_batches": [1]},
    {"phase": "backward", "micro_batches": [1]},
    {"phase": "weight_grad", "slot": "weight", "micro_batches": [1]},
    {"phase": "collective", "slot": "weight"},
    {"phase": "reduced_grad", "slot": "weight"},
    {"phase": "optimizer_state", "slot": "weight.master"},
    {"phase": "optimizer_state", "slot": "weight.exp_avg"},
    {"phase": "update", "slot": "weight.exp_avg_sq"},
    {"phase": "parameter", "slot": "weight"},
]


class _States(Hook):
    """Keeps what the reduction and the optimizer take in, after it may have been harmed."""

    def __init__(self, engine: Any, keep: Any) -> None:
        self.names = {
            id(parameter): (one.fqn, slot)
            for one in list_submodules(engine.module)
            for slot, parameter in one.parameters.items()
        }
        self.keep = keep

    def before_reduction(self, engine: Any) -> None:
        for parameter in engine.module.parameters():
            address = Address(engine.step_number, None, "collective", *self.names[id(parameter)])
            self.keep(address, accumulated_gradient(engine.optimizer, parameter))

    def before_optimizer_step(self, engine: Any) -> None:
        for fragment in owned_fragments(engine.optimizer):
            fqn, slot = self.names[id(fragment.parameter)]
            for name, value in {"master": fragment.master, **fragment.states(engine.optimizer)}.items():
                self.keep(Address(engine.step_number, None, "optimizer_state", fqn, f"{slot}.{name}"), value)


def _bits(value: torch.Tensor) -> np.ndarray:
    kind = {2: np.uint16, 4: np.uint32}[value.element_size()]
    return np.frombuffer(bytes(value.flatten().view(torch.uint8).numpy()), kind)


def _run(specs: list[dict[str, Any]], layout: tuple[int, int], model: Any, options: Any) -> Any:
    """Two steps under faults: everything that was seen, and what the injector told."""
    parallel_state.destroy_model_parallel()
    deepspeed = {"pipeline": {"activation_checkpoint_interval": 1}}
    engine = make_engine(model, *layout, deepspeed=deepspeed, **options)
    seen: dict[Address, np.ndarray] = {}

    def keep(address: Address, value: torch.Tensor) -> None:
        seen[address] = _bits(value.detach())

    injector = Injector([FaultSpec.model_validate(spec) for spec in specs], engine.dims, 64)
    engine.hooks.append(StateFaults(engine, injector))
    engine.hooks.append(_States(engine, keep))
    observer = Observer(engine, list_submodules(engine.module), [injector, keep])
    losses = train_steps(engine, 1, STEPS)
    observer.close()
    return losses, seen, injector.firings


def _each_phase(layout: tuple[int, int], model: Any, options: Any) -> int:
    """Compare a harmed run of each phase with a clean one, on every rank; returns how many phases fired somewhere."""
    clean = _run([], layout, model, options)
    assert clean[2] == []
    count = 0
    for phase in PHASES:
        step = 2 if phase["phase"] in ("optimizer_state", "collective") else 1
        shard = phase["phase"] in ("reduced_grad", "optimizer_state", "update")  # whichever replica owns it
        spec = {
            "replica": None if shard else 0,
            "submodule": FC1,
            "steps": [step, step],
            "elements": 3,
            "bits": [1, 12],
            **phase,
        }
        _, seen, firings = _run([spec], layout, model, options)
        if firings:
            (firing,) = firings
            assert (firing.address.fqn, firing.address.phase, firing.address.step) == (FC1, phase["phase"], step)
            assert firing.address.micro_batch == phase.get("micro_batches", [None])[0]
            before, after = clean[1][firing.address], seen[firing.address]
            assert tuple(np.flatnonzero(before != after)) == firing.indices and firing.changed == 3
            assert set((before ^ after)[list(firing.indices)].tolist()) == {(1 << 1) | (1 << 12)}
            assert tuple(before[list(firing.indices)]) == firing.bits_before
            assert tuple(after[list(firing.indices)]) == firing.bits_after
            earlier = list(seen)[: list(seen).index(firing.address)]
            assert all(np.array_equal(clean[1][address], seen[address]) for address in earlier)
        assert any(gather_objects(bool(firings))), phase
        count += 1
    repeated = [_run([spec], layout, model, options) for _ in range(2)]
    assert repeated[0][0] == repeated[1][0] and repeated[0][2] == repeated[1][2]
    return count


@pytest.mark.parametrize(
    ("layout", "ranks", "model", "options"),
    [
        ((1, 1), 1, GPT, {}),
        ((2, 1), 2, GPT, {"precision": "bf16"}),
        ((1, 2), 4, LLAMA, {"precision": "bf16", "grad_accum": "bf16"}),
        pytest.param((2, 1), 4, LLAMA, {}, marks=pytest.mark.full),
    ],
    ids=["1x1x1", "2x1x1_bf16", "1x2x2_bf16_bf16", "2x1x2"],
)
def test_each_phase_is_harmed_as_told(layout: Any, ranks: int, model: Any, options: Any) -> None:
    """At the stated address alone, and nowhere before it, exactly the stated bits differ from a clean run."""
    assert run_distributed(_each_phase, ranks, layout, model, options, timeout_s=300) == [len(PHASES)] * ranks


def _off_and_unmet() -> None:
    """Runs without an observer, and with one whose fault's steps never come."""
    results = []
    for armed in (False, True):
        parallel_state.destroy_model_parallel()
        engine = make_engine(GPT, 2, 1)
        if armed:
            injector = Injector([FaultSpec.model_validate({"steps": [9, None]})], engine.dims, 64)
            observer = Observer(engine, faulty_submodules(injector.specs, list_submodules(engine.module)), [injector])
        losses = train_steps(engine, 1, 3)
        if armed:
            observer.close()
        results.append((losses, [value.detach().clone() for value in engine.module.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_a_fault_that_does_not_fire_changes_no_bit() -> None:
    """Losses and weights of a run under an armed fault are those of a run without, until it fires."""
    run_distributed(_off_and_unmet, 2)


def _harm_tokens() -> Any:
    """What each stage of a pipeline reads, with one id of a micro-batch harmed."""
    engine = make_engine(GPT, 1, 2)
    spec = {"phase": "tokens", "steps": [2, 2], "micro_batches": [3], "elements": 1, "kind": "value", "value": 7}
    injector = Injector([FaultSpec.model_validate(spec)], engine.dims, 64, vocab_size=VOCAB)
    differing = []

    def steps() -> Any:
        for step in (1, 2):
            for number, batch in enumerate(micro_batches(engine, step)):
                yield batch
                differing.append((step, number, batch))

    kept = []
    stream = FaultyBatches(steps(), injector, engine)
    for _ in (1, 2):
        engine.train_step(iter_kept(stream, kept))
    clean = [batch for step in (1, 2) for batch in micro_batches(engine, step)]
    places = [
        (index // 8 + 1, index % 8, slot, (old != new).nonzero().tolist(), new[old != new].tolist())
        for index, (one, other) in enumerate(zip(clean, kept, strict=True))
        for slot, old, new in (("tokens", one[0], other[0]), ("labels", one[1][0], other[1][0]))
        if not torch.equal(old, new)
    ]
    return places, injector.firings


def iter_kept(stream: Any, kept: list[Any]) -> Any:
    """Pass on what a stream yields and keep it."""
    for batch in stream:
        kept.append(batch)
        yield batch


def test_tokens_and_labels() -> None:
    """The first stage reads one harmed token, the last one harmed label, in the stated micro-batch only."""
    for (places, firings), slot in zip(run_distributed(_harm_tokens, 2), ("tokens", "labels"), strict=True):
        ((step, micro_batch, name, [[_, column]], [value]),) = places
        assert (step, micro_batch, name, value) == (2, 3, slot, 7)
        assert [(firing.address.slot, firing.indices) for firing in firings] == [(slot, (column,))]


def _seen_slots(model: Any, tensor: int, pipeline: int) -> Any:
    engine = make_engine(model, tensor, pipeline, deepspeed={"pipeline": {"activation_checkpoint_interval": 1}})
    seen: set[tuple[str, str, str]] = set()
    observer = Observer(
        engine,
        list_submodules(engine.module),
        [lambda address, _: seen.add((address.fqn, address.phase, address.slot))],
    )
    train_steps(engine, 1, 1)
    observer.close()
    return seen


@pytest.mark.parametrize(
    ("model", "tensor", "pipeline"),
    [(GPT, 1, 1), (GPT, 2, 1), (GPT, 1, 2), (LLAMA, 2, 2), ({**GPT, "megatron": {"qk_layernorm": True}}, 1, 1)],
    ids=["gpt", "gpt_tp2", "gpt_pp2", "llama_2x2", "qk_layernorm"],
)
def test_the_catalogue_of_names_is_what_is_seen(model: Any, tensor: int, pipeline: int) -> None:
    """Every submodule, phase and slot that a config may name comes in a run, and nothing else does."""
    seen = set().union(*run_distributed(_seen_slots, tensor * pipeline, model, tensor, pipeline))
    names = submodule_slots(
        ModelSection.model_validate(model),
        ParallelSection.model_validate({"tensor": tensor, "pipeline": pipeline}),
    )
    stated = {(fqn, phase, slot) for fqn, phases in names.items() for phase, slots in phases.items() for slot in slots}
    observed = {one for one in stated if one[1] in ADDRESSED}
    assert seen == observed


CHAIN: list[tuple[dict[str, Any], set[str]]] = [
    ({"phase": "norm", "slot": "total", "kind": "scale", "factor": 8.0}, {"norm"}),
    ({"phase": "norm", "slot": "part", "kind": "scale", "factor": 8.0}, {"norm"}),
    ({"phase": "norm", "slot": "factor", "kind": "scale", "factor": 0.5}, {"read"}),
    ({"phase": "clipped_grad", "submodule": FC1, "slot": "weight", "bits": [3]}, {"read"}),
    ({"phase": "hyperparameter", "slot": "0.lr", "kind": "scale", "factor": 2.0}, {"used", "kept"}),
    ({"phase": "hyperparameter", "slot": "1.beta2", "bits": [30]}, {"used", "kept"}),
    ({"phase": "hyperparameter", "slot": "0.step", "kind": "scale", "factor": 3.0}, {"count", "kept"}),
    ({"phase": "state_at_rest", "submodule": FC1, "slot": "weight.exp_avg", "bits": [3]}, {"kept"}),
    ({"phase": "copy", "submodule": FC1, "slot": "weight", "bits": [3]}, {"parameters"}),
    ({"phase": "place", "bits": [1]}, {"consumed"}),
]
"""Faults of the chain from the reduced gradient to the parameters, and what differs on the rank first."""


class _Chain(Hook):
    """Keeps what a rank's optimizer reads in a step, and what is there after it; stands before and after faults."""

    def __init__(self, engine: Any) -> None:
        self.seen: dict[str, Any] = {}
        self.all: list[dict[str, Any]] = []
        engine.optimizer.optimizer.register_step_pre_hook(lambda inner, *_: self._read(inner))

    def _read(self, inner: Any) -> None:
        for group in inner.param_groups:
            for flat in group["params"]:
                self.seen.setdefault("read", []).append(_bits(flat.grad))
                self.seen.setdefault("used", []).append([group[name] for name in ("lr", "betas", "eps")])
                self.seen.setdefault("count", []).append(float(inner.state.get(flat, {}).get("step", 0)))

    def before_step(self, run: Any) -> None:
        self.seen["consumed"] = run.loader.position.consumed

    def after_step(self, run: Any, result: Any) -> None:
        optimizer = run.engine.optimizer
        self.seen["norm"] = result.grad_norm
        self.seen["left"] = [
            [group[name] for name in ("lr", "betas", "eps")] for group in optimizer.optimizer.param_groups
        ]
        self.seen["kept"] = [
            _bits(value)
            for fragment in owned_fragments(optimizer)
            for value in (fragment.master, *fragment.states(optimizer).values())
        ]
        self.seen["parameters"] = [_bits(one.detach()) for one in run.engine.module.parameters()]
        self.all.append(self.seen)
        self.seen = {}


def _chain_of(specs: list[dict[str, Any]], layout: tuple[int, int], options: Any) -> tuple[list[Any], list[Any]]:
    """Three steps of a run under faults in step 2: what each rank's optimizer read and left, and the firings."""
    parallel_state.destroy_model_parallel()
    engine = make_engine(GPT, *layout, **options)
    stream = MemoryStream(VOCAB, SEQUENCE, 64, 64)
    loader = MicroBatchLoader(stream, 1, engine.dims.dp_rank, engine.dims.data)
    injector = Injector([FaultSpec.model_validate({"steps": [2, 2], **spec}) for spec in specs], engine.dims, 64)
    with tempfile.TemporaryDirectory() as folder:
        events = EventLog(Path(folder), engine.dims.rank)
        run = Run(Path(folder), engine.dims, engine, loader, loader, events, dist.group.WORLD, RunProgress(3))
        faults, chain = StateFaults(engine, injector), _Chain(engine)
        engine.hooks = run.hooks = [faults, chain]
        while not run.is_last_step:
            train_step(run)
        faults.close()
        events.close()
    return chain.all, injector.firings


def _differing(clean: list[Any], faulty: list[Any]) -> list[set[str]]:
    """What differs in each step."""
    pairs = zip(clean, faulty, strict=True)
    return [{name for name in one if pickle.dumps(one[name]) != pickle.dumps(other[name])} for one, other in pairs]


def _each_link(layout: tuple[int, int], options: Any) -> Any:
    clean, none = _chain_of([], layout, options)
    assert none == []
    neutral = {"kind": "scale", "factor": 1.0}
    specs = [{"phase": phase, **neutral} for phase in ("norm", "clipped_grad", "hyperparameter", "copy")]
    armed, firings = _chain_of(specs, layout, options)
    assert not any(_differing(clean, armed)), "faults that change no bit leave every bit as it was"
    assert {one.address.phase for one in firings} == {spec["phase"] for spec in specs}
    assert {one.address.slot for one in firings} >= {"part", "total", "factor", "0.lr", "1.beta1", "0.step"}
    found = []
    for spec, _ in CHAIN:
        shard = "submodule" in spec  # whichever replica owns it
        faulty, firings = _chain_of([{**({} if shard else {"replica": 1, "tensor_rank": 0}), **spec}], layout, options)
        found.append((bool(firings), [(one.address.step, one.changed) for one in firings], _differing(clean, faulty)))
    return engine_place(layout), found


def engine_place(layout: tuple[int, int]) -> tuple[int, int]:
    """(replica, tensor rank) of this rank."""
    dims = ParallelDims(*layout, dist.get_world_size() // (layout[0] * layout[1]), dist.get_rank())
    return dims.dp_rank, dims.tp_rank


@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [
        ((1, 1), 2, {}),
        ((1, 1), 2, {"precision": "bf16"}),
        pytest.param((1, 1), 2, {"precision": "bf16", "grad_accum": "bf16"}, marks=pytest.mark.full),
        pytest.param((2, 1), 4, {}, marks=pytest.mark.full),
        pytest.param((1, 2), 4, {"precision": "bf16"}, marks=pytest.mark.full),
    ],
    ids=["1x1x2", "1x1x2_bf16", "1x1x2_bf16_bf16", "2x1x2", "1x2x2_bf16"],
)
def test_each_link_from_the_reduced_gradient_to_the_parameters(layout: Any, ranks: int, options: Any) -> None:
    """On the stated rank exactly the stated link differs first; step 1 is clean, and an armed fault changes no bit."""
    of_ranks = run_distributed(_each_link, ranks, layout, options, timeout_s=300)
    for number, (spec, first) in enumerate(CHAIN):
        assert any(found[number][0] for _, found in of_ranks), spec
        for place, found in of_ranks:
            fired, firings, (before, during, _) = found[number]
            assert before == set() and all(step == 2 and changed for step, changed in firings)
            if fired:
                assert ("submodule" in spec or place == (1, 0)) and first <= during, (spec, during)
                assert "left" not in during, (spec, during)
            elif spec["phase"] == "copy":
                assert during in (set(), {"parameters"}), (spec, during)
        if spec["phase"] == "copy":
            assert all("parameters" in found[number][2][1] for place, found in of_ranks if layout == (1, 1))
