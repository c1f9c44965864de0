"""Does a gated step compute exactly the micro-batches that were started, in every layout, whatever the clock says?

Each trial begins from the same weights. What the step with the gate came to is compared with two oracles: the sum of
those samples' gradients in float64, computed without any engine, and a step of the plain engine in which each replica
plans as many micro-batches as it completed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from harness import run_distributed
from tiny import GPT, LLAMA, SEQUENCE, VOCAB, GradientTap, make_engine

from megasdc.config.model import ModelSection
from megasdc.config.sections import ParallelSection
from megasdc.dropcompute.gate import ClockDecisions, ReplicaGate, new_replica_group
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.step_times import StepRecord, StepTimes
from megasdc.model.pipeline import build_pipeline
from megasdc.parallel import groups

pytestmark = pytest.mark.distributed

MOST = 12
"""Micro-batches of the longest step; the replicas have two samples each."""
TICK_S = 0.01
MODELS = {name: {**model, "hidden_size": 32} for name, model in (("gpt", GPT), ("llama", LLAMA))}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


# --- what is computed -------------------------------------------------------------------------------------------------


def sample(index: int, masked: bool) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A micro-batch of one sample; masked ones use different numbers of tokens."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCAB, (1, SEQUENCE + 1), generator=generator)
    mask = torch.ones(1, SEQUENCE)
    if masked:
        mask[:, SEQUENCE - index :] = 0
    return tokens[:, :-1].contiguous(), (tokens[:, 1:].contiguous(), mask)


def write_table(model: dict[str, Any], path: str) -> None:
    """Body of one rank: loss and gradient of the sum over each sample's used tokens, in float64 without an engine."""
    dims = groups.init_model_parallel(1, 1, 60)
    module, _ = build_pipeline(
        ModelSection(**model), ParallelSection(), dims, vocab_size=VOCAB, seed=1, dtype=torch.float32
    )
    module.double()
    table = {}
    for index, masked in itertools.product(range(2 * MOST), (False, True)):
        tokens, (labels, mask) = sample(index, masked)
        module.zero_grad()
        logits = module(tokens)[:, 0, :VOCAB]
        loss = (F.cross_entropy(logits, labels[0], reduction="none") * mask[0]).sum()
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        table[index, masked] = (float(loss), int(mask.sum()), gradients)
    torch.save(table, path)


@pytest.fixture(scope="session")
def table_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The file of a model's table."""

    @functools.cache
    def written(name: str) -> str:
        path = str(tmp_path_factory.mktemp("gradients") / f"{name}.pt")
        run_distributed(write_table, 1, MODELS[name], path)
        return path

    return written


# --- one trial --------------------------------------------------------------------------------------------------------


class RandomClock:
    """Seconds that pass by a random amount whenever somebody looks."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.readings = [0.0]

    def __call__(self) -> float:
        self.readings.append(self.readings[-1] + self._draw.expovariate(1 / TICK_S))
        return self.readings[-1]


@dataclass(frozen=True)
class Trial:
    """Settings of one step.

    Args:
        configured: micro-batches, by which DeepSpeed divides.
        planned: as many, or more, as `larger_batch` does.
        tau_s: threshold, in the clock's seconds.
        sigmas: of the rule `predictive`; null: `elapsed`.
        least: min_micro_batches.
        computed: whether gradients are divided by what was completed.
        masked: whether samples leave tokens out.
    """

    configured: int
    planned: int
    tau_s: float
    sigmas: float | None
    least: int
    computed: bool
    masked: bool

    @staticmethod
    def draw(draw: random.Random) -> Trial:
        """One at random; a micro-batch takes about eight looks at the clock."""
        planned = draw.randint(1, MOST)
        return Trial(
            draw.randint(1, planned) if draw.random() < 0.2 else planned,
            planned,
            draw.choice((0.0, math.inf, *(draw.uniform(0, 8 * TICK_S * planned) for _ in range(6)))),
            draw.choice((None, 0.0, 1.0)),
            draw.randint(1, planned) if draw.random() < 0.4 else 1,
            draw.random() < 0.5,
            draw.random() < 0.5,
        )


class Start:
    """Where an engine stands before a step, to go back to."""

    def __init__(self, engine: TrainingEngine) -> None:
        inner = engine.optimizer.optimizer
        self.engine = engine
        self.flats = [flat for group in inner.param_groups for flat in group["params"]]
        self.kept = [(value, value.detach().clone()) for value in (*engine.module.parameters(), *self.flats)]
        self.states = {flat: copy.deepcopy(inner.state[flat]) for flat in self.flats if flat in inner.state}

    @torch.no_grad()
    def restore(self) -> None:
        engine, state = self.engine, self.engine.optimizer.optimizer.state
        for value, start in self.kept:
            value.data.copy_(start)
        for flat in self.flats:
            state.pop(flat, None)
            if flat in self.states:
                state[flat] = copy.deepcopy(self.states[flat])
        engine.global_steps = engine.global_samples = engine.micro_steps = engine.skipped_steps = 0


def batches_of(engine: TrainingEngine, masked: bool) -> Iterator[Any]:
    """What this replica takes in a step, dealt as the loader deals."""
    for number in range(MOST):
        yield sample(number * engine.dims.data + engine.dims.dp_rank, masked)


def parameters_of(engine: TrainingEngine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gated_step(
    engine: TrainingEngine, trial: Trial, group: Any, clock: RandomClock
) -> tuple[StepResult, StepRecord, list[tuple[float, bool]]]:
    """One step that the clock may cut short; also (seconds, starts) of each decision of this rank."""
    engine.micro_batches = trial.planned
    times = StepTimes(engine.device, clock)
    decisions = ClockDecisions(times, 1, trial.sigmas)
    decisions.update(StepRecord([0.0, 0.0], [6 * TICK_S, 10 * TICK_S], [0.0, 0.0], 1.0, 1.0))
    decisions.tau_s = trial.tau_s
    decided = []

    def decide(micro_batch: int) -> bool:
        starts = decisions.decide(micro_batch)
        decided.append((clock.readings[-1] - clock.readings[begin], starts))
        return starts

    gate = engine.gate = ReplicaGate(engine.dims, group, decide, decisions.time_left_s, trial.least)
    begin = len(clock.readings)
    engine.hooks.insert(0, times)
    result = engine.train_step(batches_of(engine, trial.masked))
    gate.finish()
    engine.gate = None
    engine.hooks.remove(times)
    return result, times.pop_record(), decided


def check_decisions(
    engine: TrainingEngine, trial: Trial, record: StepRecord, decided: list[tuple[float, bool]]
) -> None:
    """All ranks of the replica completed as many, and the deciding rank's clock says so, too."""
    least = trial.least
    expected_s = 0.0 if trial.sigmas is None else (8 + 2 * trial.sigmas) * TICK_S
    if engine.decides:
        assert len(record.start_s) == engine.completed
        assert len(decided) == min(engine.completed + 1, trial.planned) - least
        assert all(starts == (seconds + expected_s < trial.tau_s) for seconds, starts in decided)
        assert all(start < seconds for start, (seconds, _) in zip(record.start_s[least:], decided, strict=False))
    if trial.tau_s in (0.0, math.inf):
        assert engine.completed == (trial.planned if trial.tau_s else least)


def check_against_table(
    table: Any, trial: Trial, counts: list[int], result: StepResult, gradients: dict[str, torch.Tensor]
) -> None:
    """Loss, tokens and gradients are those of exactly the completed samples."""
    done = [table[k * len(counts) + r, trial.masked] for r, count in enumerate(counts) for k in range(count)]
    tokens, completed = sum(one[1] for one in done), sum(counts)
    assert (result.tokens, result.micro_batches) == (tokens, completed)
    assert result.loss == pytest.approx(math.fsum(one[0] for one in done) / tokens, rel=1e-6)
    factor = 1.0 if trial.computed else completed / (trial.configured * len(counts))
    for name, got in gradients.items():
        wanted = sum(one[2][name] for one in done) * factor / tokens
        error = float((got.double() - wanted).norm() / wanted.norm())
        assert error <= 1e-6, (name, error, trial, counts)


def run_trials(
    model: dict[str, Any], tensor: int, pipeline: int, options: dict[str, Any], table_file: str | None, count: int
) -> list[tuple[int, int]]:
    """Body of a rank; returns (completed, planned) micro-batches of all replicas in each trial."""
    if options.get("precision") == "fp16":
        get_accelerator().is_fp16_supported = lambda: (
            True
        )  # of a CPU DeepSpeed does not say so, though torch computes it
    engine = make_engine(model, tensor, pipeline, **options)
    dims = engine.dims
    group = new_replica_group(dims)
    table = None if table_file is None else torch.load(table_file)
    start, before, tap = Start(engine), parameters_of(engine), GradientTap()
    engine.hooks.append(tap)
    draw, clock = random.Random(f"{tensor} {pipeline} {dims.data}"), RandomClock(dims.dp_rank)
    found = []
    for _ in range(count):
        trial = Trial.draw(draw)
        engine.set_train_batch_size(trial.configured * dims.data)
        engine.masks_tokens, engine.divides_by_used = trial.masked, trial.computed
        tap.steps.clear()

        start.restore()
        result, record, decided = gated_step(engine, trial, group, clock)
        after = parameters_of(engine)
        told: list[Any] = [None] * dims.world_size
        dist.all_gather_object(told, (dims.dp_rank, dims.pp_rank, dims.tp_rank, engine.completed, result, after))
        counts = [{one[3] for one in told if one[0] == replica} for replica in range(dims.data)]
        assert all(len(of_replica) == 1 for of_replica in counts), (trial, counts)
        check_decisions(engine, trial, record, decided)
        assert all(one[4] == result for one in told)
        replicas = [one[5] for one in told if one[1:3] == (dims.pp_rank, dims.tp_rank)]
        assert all(same(replica, after) for replica in replicas)
        assert result.skipped is None and not same(before, after)
        completed = [of_replica.pop() for of_replica in counts]
        if table is not None:
            check_against_table(table, trial, completed, result, tap.steps[0])

        start.restore()
        engine.micro_batches = completed[dims.dp_rank]
        plain = engine.train_step(batches_of(engine, trial.masked))
        assert dataclasses.asdict(plain) == dataclasses.asdict(result), (trial, completed)
        assert all(torch.equal(tap.steps[1][name], value) for name, value in tap.steps[0].items()), (trial, completed)
        assert same(parameters_of(engine), after)
        found.append((sum(completed), trial.planned * dims.data))
    return found


def check_trials(found: list[tuple[int, int]]) -> None:
    """Among many trials some stop early and some do not."""
    assert any(done < planned for done, planned in found) and any(done == planned for done, planned in found)


# --- layouts and features ---------------------------------------------------------------------------------------------

SAMPLE = [("gpt", (1, 1, 2), 12), ("gpt", (1, 4, 1), 10), ("llama", (2, 2, 1), 6)]
LAYOUTS = [*itertools.product((1, 2), repeat=3), (1, 4, 1), (1, 4, 2), (2, 4, 1)]
CASES = [
    *SAMPLE,
    *(pytest.param(*case, 30, marks=pytest.mark.full) for case in itertools.product(MODELS, LAYOUTS)),
]


@pytest.mark.parametrize(("name", "layout", "count"), CASES)
def test_exactly_what_was_started_counts(
    table_of: Callable[[str], str], name: str, layout: tuple[int, int, int], count: int
) -> None:
    """Ranks of a replica agree, gradients are the float64 sum within 1e-6, and each bit is the plain engine's."""
    tensor, pipeline, data = layout
    found = run_distributed(
        run_trials, tensor * pipeline * data, MODELS[name], tensor, pipeline, {}, table_of(name), count, timeout_s=900
    )[0]
    check_trials(found)


RECOMPUTE = {"pipeline": {"activation_checkpoint_interval": 1}}
BF16 = {"precision": "bf16"}
FEATURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sequence_parallel_recompute": ("llama", {}, {"sequence_parallel": True, "deepspeed": RECOMPUTE}),
    "bf16_all": ("gpt", DROPOUT, {**BF16, "sequence_parallel": True, "deepspeed": RECOMPUTE}),
    "dropout_recompute": ("gpt", DROPOUT, {"deepspeed": RECOMPUTE}),
    "bf16": ("llama", {}, BF16),
    "bf16_bf16": ("gpt", {}, {**BF16, "grad_accum": "bf16"}),
    "fp16": ("gpt", {}, {"precision": "fp16", "deepspeed": {"fp16": {"enabled": True, "loss_scale": 128}}}),
}
FEATURE_CASES = [
    ("sequence_parallel_recompute", (2, 2, 1), 5),
    ("bf16_all", (2, 2, 2), 4),
    *(
        pytest.param(name, layout, 12, marks=pytest.mark.full)
        for name in FEATURES
        for layout in ((2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 4, 1))
        if layout[0] > 1 or "sequence_parallel" not in FEATURES[name][2]
    ),
]


@pytest.mark.parametrize(("feature", "layout", "count"), FEATURE_CASES)
def test_features_work_with_a_stop(
    table_of: Callable[[str], str], feature: str, layout: tuple[int, int, int], count: int
) -> None:
    """With recompute, dropout, sequence parallelism and 16 bits each bit is the plain engine's, too."""
    name, changes, options = FEATURES[feature]
    tensor, pipeline, data = layout
    exact = not changes and "precision" not in options
    check_trials(
        run_distributed(
            run_trials,
            tensor * pipeline * data,
            {**MODELS[name], **changes},
            tensor,
            pipeline,
            options,
            table_of(name) if exact else None,
            count,
            timeout_s=900,
        )[0]
    )
