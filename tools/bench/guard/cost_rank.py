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


def measure_costs(messages: Messages, options: GuardCostOptions, folder: str) -> None:
    """Train on and on; send shares of calls, costs of blocks with and without traces, and seconds of what is due."""
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
        cost = time_block(lambda: train(options.steps))
        while guards:
            guards.pop().close()
        return cost

    guards: list[Any] = []

    def attach(name: str, sections: Mapping[str, Any]) -> Any:
        settings = {"logging": {"run_dir": f"{folder}/{name.replace(' ', '_')}"}, **NOTHING, **sections}
        return megasdc.attach(engine, settings)

    train(1)
    shares, stood = dict[str, list[float]](), dict[str, list[float]]()
    for number, (name, (sections, calls)) in enumerate(CALLS.items()):
        messages.progress(name, number, len(CALLS))
        with _timed(calls) as clock:
            guard = attach(name, sections)
            _share(train, clock)  # the first allocates
            shares[name] = [_share(train, clock) for _ in range(options.pairs * options.steps)]
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
