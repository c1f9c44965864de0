"""Disputes of two replicas, ``python -m tools.bench guard-disputes``: is the wrong one named, and no other?

Two replicas in one process compute the same batch as two ranks do in an audit: of a small Llama, GPT-2 or BERT, or of a
model with narrow norms, casts inside of submodules and a step function. Healthy ones compute it in two right ways: in
another order of sums, with what an operation has in between in a wider type, with another kernel of a submodule, with
other threads or without oneDNN, with attention of several operations; in fp32, bf16, fp16 and with automatic mixed
precision. Nobody may be named. Then a fault is planted in one of the first three models, at a drawn place: the output
of a submodule, the gradient of its input, that of its weight, or attention's own operation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from megasdc.attached.record import choose_watched
from tools.bench.campaign import tables
from tools.bench.guard.options import DisputeOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress
from tools.bench.result import Report, Result, table
from tools.trainings.engines import PERSISTENT, SDPA, Planted, wrong_attention
from tools.trainings.numerics import FUSED, ORDER, Other, other_attention, other_threads, use_kernel, without_library
from tools.trainings.pair import LIBRARY_MODELS, MODELS, PRECISIONS, Judged, Side, build_model, draw_batch, judge_pair

KERNEL, THREADS, LIBRARY = "another kernel", "two threads", "without oneDNN"
ATTENTION = "attention of several operations"
WAYS = (ORDER, FUSED, KERNEL, ORDER, FUSED, ATTENTION, THREADS, LIBRARY)
"""To compute; most differences come from the first ones."""
LEAST = 0.95
"""Share of faults that is to be named."""
TRIES = 40
"""Of a healthy dispute: where both ways give the same bits there is none."""


@dataclass(frozen=True)
class Dispute:
    """One dispute.

    Args:
        what: the way, of healthy replicas; else where the fault is.
        wrong: rank with the fault; None: both are healthy.
        address: of the first result that differs; empty: none did.
    """

    model: str
    precision: str
    what: str
    wrong: int | None
    address: str
    named: tuple[int, ...]
    basis: str
    reason: str

    @property
    def right(self) -> bool:
        """Whether the wrong one is named, and nobody else."""
        return self.named == (() if self.wrong is None else (self.wrong,))


@dataclass(frozen=True)
class DisputesResult(Result):
    """All disputes."""

    disputes: Sequence[Dispute] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether no wrong name was given, and enough right ones."""
        faults = [one for one in self.disputes if one.wrong is not None]
        named = sum(one.right for one in faults)
        return not any(_is_wrong_name(one) for one in self.disputes) and named >= LEAST * len(faults)

    def report(self) -> Report:
        """Counts, and what was not right."""
        faults = [one for one in self.disputes if one.wrong is not None]
        keys: dict[str, Callable[[Dispute], str]] = {"model": lambda one: one.model, "type": lambda one: one.precision}
        columns = ("healthy disputes", "wrong names", "faults", "named", "wrong names of faults")
        yield from tables("disputes", self.disputes, keys, columns, _row)
        bases = Counter(one.basis for one in faults if one.named)
        yield table("faults named by", ("basis", "faults"), [(name, str(count)) for name, count in bases.items()])
        for one in self.disputes:
            if _is_wrong_name(one) or not one.right:
                yield f"{one.model}, {one.precision}, {one.what}: {one.address} {one.named or one.reason}"


def _is_wrong_name(one: Dispute) -> bool:
    return bool(set(one.named) - {one.wrong})


def _row(some: Sequence[Dispute]) -> tuple[int, ...]:
    clean, faulty = ([one for one in some if (one.wrong is None) == healthy] for healthy in (True, False))
    wrong_names = [sum(map(_is_wrong_name, found)) for found in (clean, faulty)]
    return len(clean), wrong_names[0], len(faulty), sum(one.right for one in faulty), wrong_names[1]


def bench_disputes(options: DisputeOptions, on_progress: Progress = ignore_progress) -> DisputesResult:
    """Let the referee judge healthy replicas, and faults."""
    machine, chance, found = describe_machine(), random.Random(options.seed), list[Dispute]()
    for what, count, draw in (("healthy", options.healthy, draw_healthy), ("faults", options.faults, draw_fault)):
        for number in range(count):
            found.append(draw(number, chance))
            on_progress(what, number + 1, count)
    return DisputesResult(machine, options, found)


def draw_healthy(number: int, chance: random.Random) -> Dispute:
    """A dispute of two replicas that compute in two right ways."""
    for _ in range(TRIES):
        name, precision = list(MODELS)[number % len(MODELS)], list(PRECISIONS)[number // len(MODELS) % 4]
        way, rank = chance.choice(WAYS), chance.randrange(2)
        found = judge_pair(_healthy(name, precision, way, rank, chance))
        if found is not None:
            return _dispute(name, precision, way, None, found)
    return Dispute(name, precision, "no difference", None, "", (), "", "both ways gave the same bits")


def _healthy(name: str, precision: str, way: str, rank: int, chance: random.Random) -> tuple[Side, Side]:
    seed = chance.randrange(1 << 30)
    models, batch = [build_model(name, precision, seed) for _ in range(2)], draw_batch(precision, seed)
    around: Callable[[], AbstractContextManager[Any]] | None = None
    if way in (ORDER, FUSED):
        all_of_them = Other(way, -1)
        with all_of_them:
            Side(rank, models[1], batch).compute()
        around = partial(Other, way, chance.randrange(all_of_them.count))
    elif way == KERNEL:
        have = [one.module for one in choose_watched(models[1], None)]
        chance.shuffle(have)
        next(filter(use_kernel, have))
    else:
        around = {THREADS: other_threads, LIBRARY: without_library, ATTENTION: other_attention}[way]
    other = Side(rank, models[1], batch) if around is None else Side(rank, models[1], batch, around)
    pair = Side(1 - rank, models[0], batch), other
    return pair if rank else (pair[1], pair[0])


def draw_fault(number: int, chance: random.Random) -> Dispute:
    """A fault at a drawn place of a replica; the other one is healthy."""
    name, precision = LIBRARY_MODELS[number % 3], list(PRECISIONS)[number // 3 % 4]
    while True:
        what, rank, found = _faulty(name, precision, chance)
        if found is not None:  # what is 0 is still 0
            return _dispute(name, precision, what, rank, found)


def _faulty(name: str, precision: str, chance: random.Random) -> tuple[str, int, Judged | None]:
    seed, rank = chance.randrange(1 << 30), chance.randrange(2)
    models, batch = [build_model(name, precision, seed) for _ in range(2)], draw_batch(precision, seed)
    planted = _draw_place(models[0], batch, chance)
    sides = [Side(place, model, batch) for place, model in enumerate(models)]
    if planted.submodule == SDPA:
        sides[rank] = Side(rank, models[rank], batch, partial(wrong_attention, planted))
    else:
        planted.plant(models[rank])
    found = judge_pair((sides[0], sides[1]))
    what = f"{planted.phase} of {planted.submodule}, {planted.spoils}"
    return what, rank, found


def _draw_place(model: nn.Module, batch: Any, chance: random.Random) -> Planted:
    """Among all results that submodules of a model have, and those of attention's operation."""
    side = Side(0, model, batch)
    places = [
        (one.fqn, one.phase)
        for one in side.compute().addresses
        if one.slot in ("output", "input", "weight") and one.fqn != "model"
    ] + [(SDPA, "forward"), (SDPA, "backward")] * 4
    while True:
        fqn, phase = chance.choice(places)
        if phase != "weight_grad" or fqn in dict(model.named_modules()):
            spoils = chance.choice(("all", "row", "element"))
            return Planted(0, fqn, phase, PERSISTENT, chance.randrange(1 << 20), spoils)


def _dispute(name: str, precision: str, what: str, wrong: int | None, found: Judged) -> Dispute:
    named, basis = tuple(found.named), found.opinion.basis if found.opinion.within else ""
    return Dispute(name, precision, what, wrong, str(found.address), named, basis, found.opinion.reason)
