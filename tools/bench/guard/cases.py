"""Cases of the campaign of guards: trainings and planted faults, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tools.trainings.engines import INTERMITTENT, LLAMA, PERSISTENT, PIPELINE, TRAINER, TRANSIENT, Planted

CLEAN, OF_TWO, UNIT = "clean", "of_two", "unit"
RECORD, VERIFY = "golden record", "golden verify"
VOTED = (CLEAN, PERSISTENT, INTERMITTENT, TRANSIENT)
"""Kinds that three replicas, or a golden trace, decide."""
KINDS = (*VOTED, OF_TWO, UNIT)
"""Kinds of faults; of two: persistent, on one of two replicas; unit: at one place of products, on the only replica."""
PHASES = ("forward", "backward", "weight_grad")
TRAININGS = {
    "zero0": (LLAMA, 0),
    "zero1": (LLAMA, 1),
    "zero2": (LLAMA, 2),
    TRAINER: (TRAINER, 2),
    PIPELINE: (PIPELINE, 1),
}
"""Training and ZeRO stage by name."""
INTERVAL = 1
REPLICAS, STAGES = {OF_TWO: 2, UNIT: 1}, 2
"""Replicas by kind, of others three; stages of a pipeline."""
STEPS = 4
_OF_LLAMA = tuple(
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
    )
)
_STAGES = (("0", "2"), ("6", "8"))
"""Of each stage of the pipeline: submodules with weights."""
_WITHOUT_INPUT_GRADIENT = ("0",)
"""What gets samples."""
Sizes = tuple[int | None, int | None, int | None]
_HEAD, _LAYER = "lm_head", "model.layers.0"
UNITS: dict[tuple[bool, str], list[tuple[str, Sizes]]] = {
    (False, "forward"): [
        (f"{_LAYER}.self_attn.k_proj", (None, 32, 16)),
        (f"{_LAYER}.mlp.down_proj", (None, 48, 32)),
        (_HEAD, (None, 32, 64)),
    ],
    (False, "backward"): [(_HEAD, (None, 64, 32))],
    (False, "weight_grad"): [(_HEAD, (64, None, 32))],
    (True, "forward"): [("6", (None, 128, 16)), ("8", (None, 16, 10))],
    (True, "backward"): [("6", (None, 16, 128)), ("8", (None, 10, 16))],
    (True, "weight_grad"): [("6", (16, None, 128)), ("8", (10, None, 16))],
}
"""Of pipelines or not, and by direction: sizes of products, as of ``BrokenUnit``, and where the first of them is."""


@dataclass(frozen=True)
class Case:
    """A guarded training.

    Args:
        name: of ``TRAININGS``.
        kind: of ``KINDS``.
        planted: None: no fault.
        sizes: of the products that a unit spoils, at a place that ``planted`` has the seed of; None: no unit is wrong.
        golden: ``RECORD`` a golden file, or ``VERIFY`` with it, where a fault is on all replicas; empty: audits.
    """

    name: str
    kind: str
    precision: str
    planted: Planted | None
    sizes: Sizes | None = None
    steps: int = STEPS
    golden: str = ""

    @property
    def training(self) -> str:
        """What is trained."""
        return TRAININGS[self.name][0]

    @property
    def zero(self) -> int:
        """Stage of ZeRO."""
        return TRAININGS[self.name][1]

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return STAGES if self.training == PIPELINE else 1

    @property
    def wrong(self) -> list[int]:
        """Ranks with the fault."""
        if self.planted is None:
            return []
        replicas = _replicas(self.kind)
        first = self.planted.rank // replicas * replicas
        return list(range(first, first + replicas)) if self.golden else [self.planted.rank]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return _replicas(self.kind) * self.stages

    @property
    def permuted(self) -> bool:
        """Whether audits are made with elements in other places, too."""
        return self.kind in (CLEAN, UNIT)

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}: {self.golden} {self.planted or 'no fault'}"


def draw_cases(names: Sequence[str], trainings: int, seed: int) -> list[Case]:
    """Cases of trainings in turn: of each one kinds of faults, then directions, then types."""
    chance, cases = random.Random(seed), list[Case]()
    for number in range(trainings):
        turn, place = divmod(number, len(names))
        by_phase, kind = divmod(turn, len(KINDS))
        by_type, phase = divmod(by_phase, len(PHASES))
        precision = ("fp32", "bf16")[(place + by_type) % 2]
        cases.append(draw_case(names[place], KINDS[kind], precision, PHASES[phase], chance))
    return cases


def draw_case(name: str, kind: str, precision: str, phase: str, chance: random.Random) -> Case:
    """Draw rank and submodule of a fault."""
    if kind == CLEAN:
        return Case(name, kind, precision, None)
    replicas, piped, sizes = _replicas(kind), TRAININGS[name][0] == PIPELINE, None
    replica, stage = chance.randrange(replicas), 0
    if kind == UNIT:
        stage = int(piped)
        submodule, sizes = chance.choice(UNITS[piped, phase])
    elif not piped:
        submodule = chance.choice(_OF_LLAMA)
    else:
        stage = 1 if kind == OF_TWO else chance.randrange(STAGES)
        have = [one for one in _STAGES[stage] if phase != "backward" or one not in _WITHOUT_INPUT_GRADIENT]
        submodule = chance.choice(have)
    how = PERSISTENT if kind in (OF_TWO, UNIT) else kind
    planted = Planted(replica + stage * replicas, submodule, phase, how, chance.randrange(1 << 30))
    return Case(name, kind, precision, planted, sizes)


def _replicas(kind: str) -> int:
    return REPLICAS.get(kind, 3)
