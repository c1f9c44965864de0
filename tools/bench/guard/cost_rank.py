"""Ranks of the benchmark of what a guard costs: one training, to which protections are attached in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megasdc.attached.bounds import GuardBounds
from megasdc.attached.nonfinite import GuardNonFinite, MicroBatches
from megasdc.ops.health.attached import GuardStragglers
from tools.bench.clocks import Clock, time_block
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
    "golden": (1000, {"sdc": {"golden_interval": 1}}),
}
"""Steps of what acts now and then, and its sections here, where it acts in each step."""


def _begin(options: GuardCostOptions) -> tuple[Any, Callable[[int], None]]:
    """An engine that has taken a step, and a function that trains it for so many."""
    import deepspeed
    import torch.distributed as dist

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

    train(1)
    return engine, train


def measure_word(messages: Messages, options: GuardCostOptions, folder: str) -> None:
    """Train on and on, in blocks with a word's guard and without by turns; send their costs without audits, and what
    audits took.
    """
    import torch.distributed as dist

    import megasdc

    engine, train = _begin(options)
    guards, audits = list[tuple[Any, Path]](), list[float]()

    def attach() -> None:
        run_dir = Path(folder) / f"guard_{engine.global_steps}"
        guards.append(
            (megasdc.attach(engine, {"logging": {"run_dir": str(run_dir)}}, protect=options.protect), run_dir)
        )

    def measure(block: Block) -> Cost:
        block()
        train(options.warmup)  # also what comes first after attaching: an audit, and steps that all look
        before = sum(guard.audits for guard, _ in guards)
        cost = time_block(lambda: train(options.block_steps))
        for guard, run_dir in guards:
            guard.close()
            took = _seconds(run_dir) if dist.get_rank() == 0 else []  # others send nothing
            audits.extend(took)
            cost = Cost(cost.wall_s - sum(took[len(took) - (guard.audits - before) :]), cost.cpu_s)
        guards.clear()
        return cost

    sides: tuple[Block, Block] = (attach, lambda: None)
    costs = run_pairs(f"protect {options.protect}", sides, options.pairs, measure, messages.progress)
    messages.send(costs=costs, audits=audits)


def measure_costs(messages: Messages, options: GuardCostOptions, folder: str) -> None:
    """Train on and on; send shares of calls, costs of blocks with and without traces, and seconds of what is due."""
    import torch.distributed as dist

    import megasdc

    engine, train = _begin(options)

    def measure(block: Block) -> Cost:
        block()
        cost = time_block(lambda: train(options.block_steps))
        while guards:
            guards.pop().close()
        return cost

    guards: list[Any] = []

    def attach(name: str, sections: Mapping[str, Any]) -> Any:
        settings = {"logging": {"run_dir": f"{folder}/{name.replace(' ', '_')}"}, **NOTHING, **sections}
        return megasdc.attach(engine, settings)

    shares, stood = dict[str, list[float]](), dict[str, list[float]]()
    for number, (name, (sections, calls)) in enumerate(CALLS.items()):
        messages.progress(name, number, len(CALLS))
        with _timed(calls) as clock:
            guard = attach(name, sections)
            _share(train, clock)  # the first allocates
            shares[name] = [_share(train, clock) for _ in range(options.pairs * options.block_steps)]
            guard.close()
    traced, pairs = {"trace": {"enabled": True}}, options.pairs
    sides: tuple[Block, Block] = (lambda: guards.append(attach(TRACE, traced)), lambda: None)
    costs = run_pairs(TRACE, sides, pairs, measure, messages.progress)
    _record(attach, train, folder)
    for name, (_, sections) in SOMETIMES.items():
        path = {"sdc": {**sections["sdc"], "golden": f"{folder}/file.golden"}} if "sdc" in sections else {}
        guard = attach(name, {**sections, **path})
        train(options.audits + 1)
        guard.close()
        if dist.get_rank() == 0:
            stood[name] = _seconds(Path(folder) / name.replace(" ", "_"))[1:]
    messages.send(shares=shares, costs=costs, stood=stood)


@contextmanager
def _timed(calls: Sequence[tuple[type, str]]) -> Iterator[Clock]:
    """Add up the time of methods of classes."""
    clock, before = Clock(), [(kind, name, getattr(kind, name)) for kind, name in calls]
    try:
        for kind, name, method in before:
            setattr(kind, name, clock.wrap("all", method))
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
    guard = attach("record", {"sdc": {"golden": f"{folder}/file.golden"}, "golden": {"record": True}})
    train(1)
    guard.close()


def _seconds(folder: Path) -> list[float]:
    """How long training stood still, of each time."""
    from megasdc.events import read_events

    return [float(one.fields["seconds"]) for one in read_events(folder, rank=0) if one.name == "agreed"]
