"""Does a backward pass that ends between layers keep exactly the gradients of the layers done, each its own average?

The oracle is plain autograd in float64 without any engine, on the same layers, the input of the first that is done
detached. Each trial begins from the same weights and ends the passes of each replica where it was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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
from megasdc.dropcompute.gate import ReplayedDecisions, ReplicaGate, StepDecisions, new_replica_group
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.partial_backward import PartialBackward
from megasdc.model.pipeline import build_pipeline
from megasdc.optim.zero1 import loss_scale
from megasdc.parallel import groups

pytestmark = pytest.mark.distributed

LAYERS, REPLICAS, MOST = 4, 2, 3
FIRST_BLOCK = 2
MODELS = {name: {**model, "hidden_size": 32, "num_layers": LAYERS} for name, model in (("gpt", GPT), ("llama", LLAMA))}
assert GPT.get("tie_embeddings", True) and not LLAMA["tie_embeddings"]


def sample(index: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A micro-batch of one sample; each uses another number of tokens."""
    tokens = torch.randint(0, VOCAB, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(index))
    mask = torch.ones(1, SEQUENCE)
    mask[:, SEQUENCE - index :] = 0
    return tokens[:, :-1].contiguous(), (tokens[:, 1:].contiguous(), mask)


def write_oracle(model: dict[str, Any], path: str) -> None:
    """Body of one rank: tokens and gradients, by sample and by layers done, None: all; of parameters that are whole."""
    dims = groups.init_model_parallel(1, 1, 60)
    module, _ = build_pipeline(
        ModelSection(**model), ParallelSection(), dims, vocab_size=VOCAB, seed=1, dtype=torch.float32
    )
    module.double()
    last = FIRST_BLOCK + LAYERS
    table = {}
    for index in range(REPLICAS * MOST):
        for done in (*range(LAYERS + 1), None):
            tokens, (labels, mask) = sample(index)
            module.zero_grad()
            first = 0 if done is None else last - done
            hidden: Any = tokens
            for layer in module.forward_funcs[:first]:
                hidden = layer(hidden).detach()
            for layer in module.forward_funcs[first:]:
                hidden = layer(hidden)
            losses = F.cross_entropy(hidden[:, 0, :VOCAB], labels[0], reduction="none") * mask[0]
            losses.sum().backward()
            table[index, done] = (
                int(mask.sum()),
                float(losses.sum()),
                {
                    name: parameter.grad.clone()
                    for name, parameter in module.named_parameters()
                    if parameter.grad is not None and (done is None or not name.startswith("tied_modules"))
                },
            )
    torch.save(table, path)


class Repeats(Hook):
    """Recomputes the step's last micro-batch, and then the step, with no limit; keeps the gradients of each."""

    def __init__(self) -> None:
        self.found: list[list[torch.Tensor]] = []

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        self.found.append(self._gradients(engine))
        gate: Any = engine.gate
        number, gate.open = engine.completed - 1, True
        self._rewind(engine, number)
        engine.recompute_micro_batch(number)
        self.found.append(self._gradients(engine))
        self._rewind(engine, 0)
        engine.recompute_step()
        self.found.append(self._gradients(engine))
        gate.open = False

    @staticmethod
    def _gradients(engine: TrainingEngine) -> list[torch.Tensor]:
        return [getattr(one, "_hp_grad", one.grad).clone() for one in engine.module.parameters()]

    @staticmethod
    def _rewind(engine: TrainingEngine, number: int) -> None:
        engine.set_dataiterator(batches_of(engine, number))


def batches_of(engine: TrainingEngine, first: int = 0) -> Iterator[Any]:
    """What this replica takes in a step, dealt as the loader deals."""
    for number in range(first, MOST):
        yield sample(number * REPLICAS + engine.dims.dp_rank)


def trials(seed: int, depths: tuple[int, ...]) -> Iterator[StepDecisions]:
    """Decisions of a step at random; the first ends no pass, the second nearly all where one micro-batch is planned."""
    draw = random.Random(seed)
    yield StepDecisions(MOST, (MOST, MOST - 1), (None, None), LAYERS)
    yield StepDecisions(1, (1, 1), (depths[0], depths[1]), LAYERS)
    for _ in range(5):
        planned = draw.randint(1, MOST)
        completed = draw.randint(1, planned), draw.randint(1, planned)
        yield StepDecisions(planned, completed, tuple(draw.choice((None, *depths)) for _ in range(REPLICAS)), LAYERS)


def wanted_gradient(table: Any, step: StepDecisions, name: str) -> torch.Tensor:
    """Mean over the tokens of the micro-batches that reached a parameter; zeros where none did."""
    tokens, total = 0, torch.zeros_like(table[0, None][2][name])
    for replica, count in enumerate(step.completed):
        for number in range(count):
            done = step.layers[replica] if number == count - 1 else None
            used, _, gradients = table[number * REPLICAS + replica, done]
            if name in gradients:
                tokens, total = tokens + used, total + gradients[name]
    return total / max(tokens, 1)


def run_trials(
    model: dict[str, Any], options: dict[str, Any], oracle: str, depths: tuple[int, ...], tolerance: float
) -> None:
    """Body of a rank."""
    if options.get("precision") == "fp16":  # of a CPU DeepSpeed does not say so, though torch computes it
        get_accelerator().is_fp16_supported = lambda: True
    engine = make_engine(model, 1, 1, masks_tokens=True, lr=0.0, **options)
    dims, table = engine.dims, torch.load(oracle)
    replayed = ReplayedDecisions(dims.dp_rank)
    gate = ReplicaGate(dims, new_replica_group(dims), replayed.decide, replayed.time_left_s, 1, replayed.goes_on)
    tap, repeats = GradientTap(), Repeats()
    engine.hooks += [tap, repeats]
    engine.divides_by_used = True
    before = _hooks(engine)
    for step in trials(1, depths):
        engine.set_train_batch_size(step.planned * REPLICAS)
        engine.gate, engine.partial = gate, PartialBackward(engine.module, gate.may_go_on)
        replayed.begin(step)
        tap.steps.clear()
        repeats.found.clear()
        result = engine.train_step(batches_of(engine))
        gate.finish()
        assert engine.ended_after == step.layers[dims.dp_rank]
        first, *others = repeats.found
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)), step
        done = [
            table[number * REPLICAS + replica, None]
            for replica, count in enumerate(step.completed)
            for number in range(count)
        ]
        assert result.tokens == sum(one[0] for one in done) and result.micro_batches == sum(step.completed)
        assert result.loss == pytest.approx(sum(one[1] for one in done) / result.tokens, rel=100 * tolerance)
        for name, got in tap.steps[0].items():
            wanted = wanted_gradient(table, step, name)
            error = float((got.double() / loss_scale(engine) - wanted).norm()) / max(float(wanted.norm()), 1e-30)
            assert error <= tolerance, (name, error, step)
            factors = [engine.gradient_factor_of(one) for key, one in engine.module.named_parameters() if key == name]
            assert all(factor == 0 for factor in factors) == (not wanted.any()), (name, step)
        ended = tap.steps[0]
        engine.partial.close()
        engine.partial = None
        if not step.ended:  # whole passes: the bits of averages over whole micro-batches
            replayed.begin(step)
            engine.train_step(batches_of(engine))
            gate.finish()
            assert all(torch.equal(tap.steps[1][name], value) for name, value in ended.items())
    assert _hooks(engine) == before
    dist.barrier()


def _hooks(engine: TrainingEngine) -> list[Any]:
    """What calls a pass of this model's modules."""
    hooks = [list(module._forward_pre_hooks.values()) for module in engine.module.modules()]
    return [engine.module.activation_checkpoint_func, *hooks]


def _recompute(interval: int, **options: Any) -> dict[str, Any]:
    return {"deepspeed": {"pipeline": {"activation_checkpoint_interval": interval, **options}}}


ALL = tuple(range(LAYERS + 1))
BF16 = {"precision": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], float]] = {
    "tied": ("gpt", {}, ALL, 1e-5),
    "untied_recompute": ("llama", _recompute(1), ALL, 1e-5),
    "recompute_two_together": ("gpt", _recompute(2), (2, 4, 0), 1e-5),
    "bf16_recompute": ("gpt", {**BF16, **_recompute(1)}, ALL, 0.05),
    "not_reentrant": ("gpt", _recompute(2, use_reentrant=False), ALL, 1e-5),
    "fp16": ("gpt", {"precision": "fp16", "deepspeed": {"fp16": {"enabled": True, "loss_scale": 128}}}, ALL, 0.02),
    "bf16_bf16": ("llama", {**BF16, "grad_accum": "bf16"}, ALL, 0.05),
}


@pytest.mark.parametrize("case", CASES)
def test_each_parameter_is_averaged_over_the_micro_batches_that_reached_it(
    oracle_of: Callable[[str], str], case: str
) -> None:
    """Autograd's sums and counts; recomputed micro-batches and steps have the step's bits; whole passes change none."""
    name, options, depths, tolerance = CASES[case]
    run_distributed(run_trials, REPLICAS, MODELS[name], options, oracle_of(name), depths, tolerance)


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The file of a model's table, which is made once."""
    files: dict[str, str] = {}

    def written(name: str) -> str:
        if name not in files:
            path = str(tmp_path_factory.mktemp("oracle") / f"{name}.pt")
            run_distributed(write_oracle, 1, MODELS[name], path)
            files[name] = path
        return files[name]

    return written
