"""Ranks of the benchmark of what a guard costs: one training, to which protections are attached in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megasdc.attached.bounds import GuardBounds
from megasdc.attached.nonfinite import GuardNonFinite, MicroBatches
from megasdc.ops.health.attached import GuardStragglers
from tools.bench.clocks import Clock
from tools.bench.guard.options import GuardCostOptions
from tools.bench.rank import TIMEOUT_S, Messages
from tools.bench.statistics import Block, Cost, run_pairs
from tools.trainings.engines import deepspeed_config, llama_engine

NOTHING: Mapping[str, Any] = {
    "audit": {"enabled": False},
    "nonfinite": {"enabled": False},
    "health": {"slow_ratio": None},
}
_BOUNDS = [{"hook": "spike_aware", "theta": 50}, {"hook": "absolute", "theta": 0.01}]
CALLS: Mapping[str, tuple[Mapping[str, Any], tuple[tuple[type, str], ...]]] = {
    "stragglers": (
        {"health": {"slow_ratio": 1.05}},
        ((GuardStragglers, "_begin"), (GuardStragglers, "_end"), (GuardStragglers, "after_step")),
    ),
    "NaN and Inf": (
        {"nonfinite": {"enabled": True}},
        ((GuardNonFinite, "before_step"), (MicroBatches, "_begin"), (MicroBatches, "_end")),
    ),
    "bounds": ({"optimizer_hooks": _BOUNDS}, ((GuardBounds, "before_step"), (GuardBounds, "after_step"))),
}
"""Sections of what acts in each step, and its calls."""
TRACE = "trace"
SOMETIMES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "audit": (50, {"audit": {"interval": 1}}),
    "audit, permuted": (50, {"audit": {"interval": 1, "permuted": True}}),
    "golden": (1000, {"golden": {"interval": 1}}),
}
"""Steps of what acts now and then, and its sections here, where it acts in each step."""


def measure_costs(messages: Messages, options: GuardCostOptions, folder: str) -> None:
    """Train on and on; rank 0 sends costs of blocks with and without each protection, and seconds that others took."""
    import deepspeed
    import torch.distributed as dist

    import megasdc
    from megasdc.parallel.groups import init_process_group

    init_process_group(TIMEOUT_S)  # the ranks meet in a folder, which only this looks for
    deepspeed.init_distributed(dist_backend="gloo")
    more = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": options.micro_batches}
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
    }
    length = options.sequence
    engine = llama_engine(deepspeed_config(1, "fp32", more), None, **sizes, max_position_embeddings=length)
    draw = torch.Generator().manual_seed(dist.get_rank())

    def train(steps: int) -> None:
        for _ in range(steps * options.micro_batches):
            tokens = torch.randint(0, 64, (1, length), generator=draw)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    def measure(block: Block) -> Cost:
        block()
        cost = _clocked(lambda: train(options.steps))
        while guards:
            guards.pop().close()
        return cost

    guards: list[Any] = []

    def attach(name: str, sections: Mapping[str, Any]) -> Any:
        settings = {"logging": {"run_dir": f"{folder}/{name.replace(' ', '_')}"}, **NOTHING, **sections}
        return megasdc.attach(engine, settings)

    train(1)
    for number, (name, (sections, calls)) in enumerate(CALLS.items()):
        messages.send(name=name, done=number, total=len(CALLS))
        with _timed(calls) as clock:
            guard = attach(name, sections)
            shares = [_share(train, clock) for _ in range(options.pairs * options.steps + 1)]
            guard.close()
        messages.send(name=name, shares=shares[1:])  # the first allocates

    def tell(what: str, done: int, total: int) -> None:
        messages.send(name=what, done=done, total=total)

    traced = {"trace": {"enabled": True}}
    costs = run_pairs(TRACE, (lambda: guards.append(attach(TRACE, traced)), lambda: None), options.pairs, measure, tell)
    messages.send(name=TRACE, costs=costs)
    _record(attach, train, folder)
    for name, (_, sections) in SOMETIMES.items():
        path = {"golden": {**sections["golden"], "path": f"{folder}/file.golden"}} if "golden" in sections else {}
        guard = attach(name, {**sections, **path})
        train(options.audits + 1)
        guard.close()
        if dist.get_rank() == 0:
            messages.send(name=name, seconds=_seconds(Path(folder) / name.replace(" ", "_"))[1:])


@contextmanager
def _timed(calls: Sequence[tuple[type, str]]) -> Iterator[Clock]:
    """Add up the time of methods of classes."""
    clock, before = Clock(), [(kind, name, getattr(kind, name)) for kind, name in calls]

    def timing(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: clock.timed("all", partial(method, *args, **options))

    try:
        for kind, name, method in before:
            setattr(kind, name, timing(method))
        yield clock
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)


def _share(train: Callable[[int], None], clock: Clock) -> float:
    """Share of a step's time that the calls have taken."""
    inside, began = clock.total_s, time.perf_counter()
    train(1)
    return (clock.total_s - inside) / (time.perf_counter() - began)


def _record(attach: Callable[..., Any], train: Callable[[int], None], folder: str) -> None:
    guard = attach("record", {"golden": {"path": f"{folder}/file.golden", "record": True}})
    train(1)
    guard.close()


def _clocked(work: Callable[[], None]) -> Cost:
    """Wall time here, and processor time of this rank."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def _seconds(folder: Path) -> list[float]:
    """How long training stood still, of each time."""
    from megasdc.events import read_events

    return [float(one.fields["seconds"]) for one in read_events(folder, rank=0) if one.name == "agreed"]
