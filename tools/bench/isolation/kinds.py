"""Kinds of faults that go on, in a replica that a run is to leave out: drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, REDUCED_GRAD, UPDATE, WEIGHT_GRAD
from megasdc.config.faults import COLLECTIVE, OPTIMIZER_STATE
from tools.bench.campaign import Layout

CLEAN, AGAIN = "clean", "again"
STEPS = 9
FIRST_STEPS = (3, 4, 5)
"""In which a fault comes first."""
DUE_STEPS = (4, 6)
"""In which slices look at weights of linear layers, which decay; in others they look at the rest."""
_WRONG: Mapping[str, Any] = {"kind": "scale", "factor": 1.5}
_LAYERS = ("*.linear_fc1", "*.linear_fc2", "*.linear_qkv", "*.linear_proj")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        phases: one of which a fault is in.
        spec: what it does, as a part of a spec.
        first: steps, in one of which it comes first.
        names: whether what it does names its rank; else a fault of a computation comes with it, in the same replica.
    """

    title: str
    phases: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=lambda: _WRONG)
    first: tuple[int, ...] = FIRST_STEPS
    names: bool = True


_SLOT = {**_WRONG, "slot": "weight*", "submodule": "*.linear_*"}
"""In all of them: a shard does not hold every weight."""
KINDS: dict[str, Kind] = {
    CLEAN: Kind("no fault"),
    "compute": Kind("computation, always", (FORWARD, BACKWARD, WEIGHT_GRAD)),
    "sometimes": Kind("computation, now and then", (FORWARD,), {**_WRONG, "probability": 0.5}),
    "nan": Kind("computation, NaN", (FORWARD, BACKWARD), {"kind": "value", "value": "nan"}),
    "state": Kind("memory of the optimizer", (OPTIMIZER_STATE,), _SLOT, DUE_STEPS),
    "update": Kind("update of a shard", (UPDATE,), _SLOT, DUE_STEPS),
    "weights": Kind("memory of the weights", (PARAMETER,)),
    "shard": Kind("reduced gradient of a shard, and computation", (REDUCED_GRAD,), names=False),
    "sum": Kind("gradient given to the collective, and computation", (COLLECTIVE,), names=False),
    AGAIN: Kind("computation, in one replica and then in another", (FORWARD, BACKWARD, WEIGHT_GRAD)),
}


@dataclass(frozen=True)
class Harm:
    """The faults of a drill.

    Args:
        replicas: that are wrong, in the order in which they become so; empty: none.
        specs: of the faults, as in a configuration.
    """

    kind: str
    precision: str
    replicas: tuple[int, ...]
    specs: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        where = ", ".join(f"{one['phase']} of {one['submodule']} from step {one['steps'][0]}" for one in self.specs)
        return f"{KINDS[self.kind].title} in replicas {list(self.replicas)}, {self.precision}: {where or 'none'}"


def draw_harm(kind: str, layout: Layout, precision: str, chance: random.Random) -> Harm:
    """Draw the faults of a drill; in two replicas where the kind says so."""
    drawn = KINDS[kind]
    replicas = tuple(chance.sample(range(layout[2]), {CLEAN: 0, AGAIN: 2}.get(kind, 1)))
    first, specs = chance.choice(drawn.first), list[dict[str, Any]]()
    for number, replica in enumerate(replicas):
        for one in (drawn, *(() if drawn.names else (KINDS["compute"],))):
            specs.append(
                {
                    "submodule": chance.choice(_LAYERS),
                    **one.spec,
                    "phase": chance.choice(one.phases),
                    "replica": replica,
                    "steps": [first + 2 * number, None],
                    "seed": chance.randrange(1 << 30),
                }
            )
    return Harm(kind, precision, replicas, tuple(specs))
