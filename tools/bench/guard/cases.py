"""Cases of the campaign of guards: trainings and planted faults, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.bench.guard.trainings import INTERMITTENT, LLAMA, PERSISTENT, PIPELINE, TRAINER, TRANSIENT, Planted

CLEAN = "clean"
RECORD, VERIFY = "golden record", "golden verify"
KINDS = (CLEAN, PERSISTENT, INTERMITTENT, TRANSIENT)
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
REPLICAS, STAGES = 3, 2
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


@dataclass(frozen=True)
class Case:
    """A guarded training.

    Args:
        name: of ``TRAININGS``.
        kind: of ``KINDS``.
        planted: None: no fault.
        golden: ``RECORD`` a golden file, or ``VERIFY`` with it, where a fault is on all replicas; empty: audits.
    """

    name: str
    kind: str
    precision: str
    planted: Planted | None
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
        first = self.planted.rank // REPLICAS * REPLICAS
        return list(range(first, first + REPLICAS)) if self.golden else [self.planted.rank]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return REPLICAS * self.stages

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}: {self.golden} {self.planted or 'no fault'}"


def draw_case(name: str, kind: str, precision: str, phase: str, chance: random.Random) -> Case:
    """Draw rank and submodule of a fault."""
    if kind == CLEAN:
        return Case(name, kind, precision, None)
    replica, stage = chance.randrange(REPLICAS), 0
    if TRAININGS[name][0] != PIPELINE:
        submodule = chance.choice(_OF_LLAMA)
    else:
        stage = chance.randrange(STAGES)
        have = [one for one in _STAGES[stage] if phase != "backward" or one not in _WITHOUT_INPUT_GRADIENT]
        submodule = chance.choice(have)
    planted = Planted(replica + stage * REPLICAS, submodule, phase, kind, chance.randrange(1 << 30))
    return Case(name, kind, precision, planted)
