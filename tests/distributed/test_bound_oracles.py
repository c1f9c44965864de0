"""Do shards of eight ranks step as whole tensors on one rank would, and does an outlier anywhere move nothing else?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from whole_runs import prepare_text, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

OPTIMIZERS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"deepspeed__bf16": {"enabled": True}}}
ABSOLUTE = {"hook": "absolute", "theta": 1e-3}
SPIKE = {"hook": "spike_aware", "theta": 50.0, "grace_steps": 1}
LAYOUT = {"parallel__tensor": 2, "parallel__pipeline": 2}
SHORT = {"training__eval_interval": 0, "checkpoint__interval": 0}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _gathered(config: str) -> list[dict[str, Any]]:
    """Train, and before each step's bounds gather masters and gradients of the stage with DeepSpeed's own tool.

    Of each step: number, place in the replica, learning rate, the norm that came out, and by name (master, gradient,
    dimension that tensor ranks share, null: each has it whole, weight decay), the same on all replicas.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
    from whole_runs import pretrain_rank

    from megasdc.train.gradient_bounds import GradientBounds

    seen: list[dict[str, Any]] = []
    original = GradientBounds.before_optimizer_step

    def gather(self: Any, engine: Any) -> None:
        groups = engine.optimizer.bf16_groups if engine.bfloat16_enabled() else engine.optimizer.bit16_groups
        settings = [dict(group, params=None) for group in engine.optimizer.param_groups]
        wholes = {}
        for group, parameters in zip(settings, groups, strict=True):
            for one in parameters:
                shared = one.partition_dim if getattr(one, "tensor_model_parallel", False) else None
                whole = safe_get_full_fp32_param(one).clone(), safe_get_full_grad(one).clone()
                wholes[self._names[id(one)]] = (*whole, shared, group["weight_decay"])
        place = engine.dims.pp_rank, engine.dims.tp_rank
        seen.append({"step": engine.step_number, "place": place, "lr": settings[0]["lr"], "wholes": wholes})
        original(self, engine)
        seen[-1]["norm"] = float(engine.step_control._norm)

    GradientBounds.before_optimizer_step = gather  # type: ignore[method-assign]
    assert pretrain_rank(config, []) == (0, None)
    return seen


def _whole_model(ranks: list[list[dict[str, Any]]], place: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """(master, gradient, weight decay) of each parameter of the whole model before a step, fp64."""
    stages: dict[str, dict[int, Any]] = {}
    for seen in sorted(ranks, key=lambda one: one[place]["place"]):
        stage, tensor_rank = seen[place]["place"]
        for name, whole in seen[place]["wholes"].items():
            stages.setdefault(name, {}).setdefault(stage, {})[tensor_rank] = whole
    found = {}
    for name, copies in stages.items():
        joined = [_joined([parts[rank] for rank in sorted(parts)]) for _, parts in sorted(copies.items())]
        assert all(torch.equal(one[1], joined[0][1]) for one in joined), f"the copies of the tied {name} have parted"
        found[name] = joined[0]
    return found


def _joined(parts: list[Any]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """One parameter from what its tensor ranks hold."""
    masters, gradients, (shared, *_), (decay, *_) = zip(*parts, strict=True)
    if shared is None:
        assert all(torch.equal(one, gradients[0]) for one in gradients)
        return masters[0].double(), gradients[0].double(), decay
    return torch.cat(masters, shared).double(), torch.cat(gradients, shared).double(), decay


PUBLISHED = {"floor": 0.0}
CORRECTED = {"bias_corrected": True, "floor": 1e-10}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("fp32", {}), ("bf16", {}), pytest.param("fp32", PUBLISHED, marks=pytest.mark.full), ("fp32", CORRECTED)],
    ids=str,
)
def test_shards_of_eight_ranks_step_as_one_rank_would(
    tmp_path: Path, data: Path, optimizer: str, options: dict[str, Any]
) -> None:
    """Gathered from 2x2x2, bounded, normed, clipped and stepped in float64 by torch's AdamW, masters are the run's.

    Whole gradients are gathered before the bounds, with DeepSpeed's own tool; the oracle's V is its own all the way.
    """
    theta, absolute, steps = 2.0, 0.02, 5
    first, second, eps, largest = 0.9, 0.95, 1e-8, 0.1
    floor = options.get("floor", eps**2)
    hooks = [{**SPIKE, "theta": theta, "grace_steps": 0, **options}, {**ABSOLUTE, "theta": absolute}]
    changes = {**LAYOUT, **SHORT, **OPTIMIZERS[optimizer], "training__steps": steps, "optimizer_hooks": hooks}
    changes["deepspeed__gradient_clipping"] = largest
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", **changes)
    ranks = run_distributed(_gathered, 8, str(config), init=False)
    start = _whole_model(ranks, 0)
    weights = {name: master.clone().requires_grad_() for name, (master, _, _) in start.items()}
    groups = [{"params": [weights[name]], "weight_decay": decay} for name, (_, _, decay) in start.items()]
    inner = torch.optim.AdamW(groups, betas=(first, second), eps=eps)
    bounded = least = 0
    clipped: list[float] = []
    for place in range(steps):
        model = _whole_model(ranks, place)
        assert model.keys() == weights.keys() and ranks[0][place]["step"] == place + 1
        for name, (master, gradient, _) in model.items():
            difference = (weights[name].detach() - master).norm()
            assert float(difference) <= 1e-6 * float(master.norm()), (place, name)
            limit = torch.full_like(gradient, absolute)
            if place:
                moment = inner.state[weights[name]]["exp_avg_sq"]
                if "bias_corrected" in options:
                    moment = moment / (1 - second**place)
                weights_of_v = [second ** (place - 1 - earlier) for earlier in range(place)]
                unclip = sum(weights_of_v) / sum(w * c**2 for w, c in zip(weights_of_v, clipped, strict=True))
                moment, lowest = moment * unclip, floor * unclip
                least += int(((moment <= lowest) & (gradient != 0)).sum())
                spike = torch.where(moment.clamp(min=lowest) > 0, (theta * moment.clamp(min=lowest)).sqrt(), torch.inf)
                limit = limit.minimum(spike)
            weights[name].grad = gradient.clamp(-limit, limit)
            bounded += int((gradient.abs() > limit).sum())
        norm = float(torch.cat([one.grad.flatten() for one in weights.values()]).norm())
        assert [seen[place]["norm"] for seen in ranks] == pytest.approx([norm] * 8, rel=1e-6)
        clipped.append(min(1.0, largest / (norm + 1e-6)))
        for one in weights.values():
            one.grad *= clipped[-1]
        for group in inner.param_groups:
            group["lr"] = ranks[0][place]["lr"]
        inner.step()
    assert bounded > 1000 and (least > 100) == (floor > 0)
    assert min(clipped) < 0.9, "the clip acts, so that it matters"


class _Step:
    """Takes an optimizer's step again and again from the same gradients, masters, moments and counts."""

    def __init__(self, engine: Any) -> None:
        from megasdc.optim.zero1 import is_bf16_optimizer, owned_fragments, reduced_gradients

        self._optimizer = engine.optimizer
        self.fragments = list(owned_fragments(self._optimizer))
        state = self._optimizer.optimizer.state
        moments = [value for one in state.values() for value in one.values() if isinstance(value, torch.Tensor)]
        flats = list({id(one.flat): one.flat.detach() for one in self.fragments}.values())
        tensors = [*reduced_gradients(self._optimizer), *moments, *flats]
        self._kept = [(tensor, tensor.clone()) for tensor in tensors]
        self._bf16 = is_bf16_optimizer(self._optimizer)
        if self._bf16:
            self._present = [list(flags) for flags in self._optimizer.fp32_groups_has_gradients]
        else:
            self._lists = {key: list(own) for key, own in self._optimizer.averaged_gradients.items()}

    def restore(self) -> None:
        """Everything is as it was before the step."""
        for tensor, kept in self._kept:
            tensor.copy_(kept)
        if self._bf16:
            self._optimizer.fp32_groups_has_gradients[:] = [list(flags) for flags in self._present]
        else:
            self._optimizer.averaged_gradients.update({key: list(own) for key, own in self._lists.items()})

    def take(self) -> torch.Tensor:
        """What a step adds to the masters of this rank, fp64."""
        before = torch.cat([one.master.double() for one in self.fragments])
        self._optimizer.step()
        return torch.cat([one.master.double() for one in self.fragments]) - before


def _change_of_others(clean: torch.Tensor, update: torch.Tensor, hit: int | None) -> tuple[float, float]:
    """Sums of squares of the difference and of the clean update, without the element that was hit."""
    difference = update - clean
    if hit is not None:
        difference[hit] = 0
    return float(difference.square().sum()), float(clean.square().sum())


def _share(changes: list[tuple[float, float]]) -> float:
    """Relative change over all ranks, of what ``_change_of_others`` has of each."""
    differences, wholes = zip(*changes, strict=True)
    return (sum(differences) / sum(wholes)) ** 0.5


def _hit_at_random(config: str, seeds: list[int]) -> list[Any]:
    """Train; before the third step try outliers anywhere in the model: of each the changes with bounds and without."""
    import random

    from whole_runs import pretrain_rank

    from megasdc.parallel.collectives import gather_objects
    from megasdc.train.gradient_bounds import GradientBounds

    found: list[Any] = []
    original = GradientBounds.before_optimizer_step

    @torch.no_grad()
    def attempt(self: Any, engine: Any) -> None:
        if engine.step_number != 3:
            return original(self, engine)
        step, rank = _Step(engine), engine.dims.rank
        sizes = [(self._names[id(one.parameter)], one.numel) for one in step.fragments]
        everywhere = [
            (name, owner, place)
            for owner, own in enumerate(gather_objects(sizes, self._run.host_group))
            for place, (name, _) in enumerate(own)
        ]
        original(self, engine)
        clean = step.take()
        for seed in seeds:
            draw = random.Random(seed)
            wanted = draw.choice(sorted({name for name, _, _ in everywhere}))
            _, owner, place = draw.choice([one for one in everywhere if one[0] == wanted])
            share, sign = draw.random(), draw.choice((1, -1))
            for value in (sign * 1e12, sign * torch.inf, torch.nan):
                changes = []
                for bounded in (True, False):
                    step.restore()
                    hit = None
                    if rank == owner:
                        element = int(share * sizes[place][1])
                        step.fragments[place].gradient[element] = value
                        hit = sum(numel for _, numel in sizes[:place]) + element
                    if bounded:
                        original(self, engine)
                    else:
                        engine.step_control.decide(None, False)
                    changes.append(_change_of_others(clean, step.take(), hit))
                found.append(((seed, wanted, owner, str(value)), changes))
        step.restore()
        original(self, engine)

    GradientBounds.before_optimizer_step = attempt  # type: ignore[method-assign]
    assert pretrain_rank(config, []) == (0, None)
    return found


@pytest.mark.parametrize("optimizer", ["fp32", "bf16"])
def test_an_outlier_at_a_random_place_moves_nothing_else(tmp_path: Path, data: Path, optimizer: str) -> None:
    """Any parameter, element and rank of 2x2x2: the other updates stay with the bounds, and are destroyed without.

    Bounded gradients have a norm below the clip here: of so small a model one element at its limit is a notable share.
    """
    hooks = [{**SPIKE, "non_finite": "bound"}, {**ABSOLUTE, "non_finite": "bound"}]
    changes = {**LAYOUT, **SHORT, **OPTIMIZERS[optimizer], "training__steps": 3, "optimizer_hooks": hooks}
    config = write_config(tmp_path / "a.json", data, tmp_path / "a", **changes)
    ranks = run_distributed(_hit_at_random, 8, str(config), list(range(4)), init=False, timeout_s=240.0)
    assert len({owner for (_, _, owner, _), _ in ranks[0]}) >= 3, "the places are all over the ranks"
    for trials in zip(*ranks, strict=True):
        bounded, free = (_share([changes[number] for _, changes in trials]) for number in (0, 1))
        assert bounded <= 1e-6 and not free <= 0.1, trials[0][0]
