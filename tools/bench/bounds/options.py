"""Options of the benchmarks of gradient bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megasdc.cli.app import input_option
from megasdc.common.errors import DataError
from megasdc.config.hooks import ABSOLUTE, BOUNDS, SPIKE_AWARE, HookSpec
from tools.bench.options import Options, numbers, option
from tools.bench.small.gpt import SmallGpt

GRACE_STEPS: int = HookSpec.model_fields["grace_steps"].default
"""First steps, in which a spike-aware bound does not act yet, and no gradient is measured."""
DECADES = range(1, 13)
FALL = 0.7
"""Probability of a factor of 10^k over that of 10^(k-1): the larger, the rarer, but the largest do come."""
SHARES = {"tight": 1e-2, "moderate": 1e-4, "loose": 1e-6}
"""Share of the elements of healthy gradients that a theta may bound."""
NONE = "none"
_THETAS = "Thresholds, separated by commas, empty: none; default: three are chosen."


@dataclass(frozen=True)
class BoundsBenchOptions(Options):
    """Compare gradient bounds with reading g and V once, and with optimizer steps; exit code 1 if a bar is missed.

    The pass bounds elements and sums squares for the norm. Read once is the faster of a compiled loop that adds both up
    and g.sum(), V.sum(). Ratios are our time over theirs in alternating blocks, with an exact interval of the median.
    Run it on a machine that does nothing else; the first run compiles DeepSpeed's CPU Adam, for a minute or more.

    Args:
        blocks: one pair before those that count does not.
    """

    blocks: int = option(30, "Blocks of each side.", least=1)
    sizes_million: tuple[int, ...] = option(
        (1, 4, 16, 64),
        "Elements of a shard in units of 2^20; may be repeated; default: 1, 4, 16, 64.",
        "--sizes",
        least=1,
    )
    threads: int = option(1, "CPU threads of torch's operations and optimizers; the pass has one.", least=1)


@dataclass(frozen=True)
class Setting:
    """The bound of gradients in a run: ``none``, ``absolute`` or ``spike_aware``, with its threshold theta.

    ``chosen`` is ``tight``, ``moderate`` or ``loose``; empty where theta was given, and without a bound.
    """

    bound: str = NONE
    theta: float | None = None
    chosen: str = ""

    @property
    def name(self) -> str:
        """As tables show it."""
        if self.theta is None:
            return "no bound"
        return f"{self.bound.replace('_', '-')} {self.theta:g}" + (f" ({self.chosen})" if self.chosen else "")


@dataclass(frozen=True)
class BoundTrainOptions(Options):
    """Train a small GPT healthy and with faults on one replica's gradient, without and with gradient bounds.

    Prints final losses as the table of Pei et al. 2025 does: worst case, number of worse cases, diverged runs; and the
    cost of each bound on healthy runs. It only measures; there is no bar.

    Args:
        fault_probability: probability that 10^1 is injected into a parameter's gradient, for each sign; 10^k less and
            less.
        data: folder of prepared data; None: the standard library is prepared.
        absolute: thresholds; None: three are chosen.
        spike_aware: likewise.
    """

    steps: int = option(400, "Optimizer steps of a run.", least=GRACE_STEPS + 1)
    seeds: int = option(3, "Runs of each kind; a seed is of weights and faults.", least=1)
    hidden: int = option(64, "Width h; a multiple of 32.", least=1)
    layers: int = option(2, "Transformer layers.", least=1)
    sequence: int = option(64, "Tokens of a sample.", least=1)
    vocab: int = option(1024, "Entries of the vocabulary, without --data.")
    micro_batch: int = option(8, "Samples of a step on each replica.", least=1)
    learning_rate: float = option(5e-3, "Peak of the schedule.")
    fault_probability: float = option(
        0.01, "Probability that +10 (or -10) is injected into a parameter's gradient in a step."
    )
    eval_samples: int = option(256, "Validation samples.", min=1)
    precision: Literal["fp32", "bf16"] = option("fp32", "Type of parameters.")
    data: Path | None = option(
        None,
        "Folder of prepared data; default: the standard library's modules.",
        make=input_option,
        reads=DataError,
    )
    absolute: tuple[float, ...] | None = numbers(None, _THETAS, "--absolute", "2e-4,1e-3")
    spike_aware: tuple[float, ...] | None = numbers(None, "As --absolute.", "--spike-aware", "100,1e4")

    def problems(self) -> list[str]:
        """See ``Options``."""
        found = self.gpt.problems()
        if not 0 < self.fault_probability <= 1:
            found.append(f"--fault-probability: {self.fault_probability} must be above 0 and at most 1")
        for bound in BOUNDS:
            if any(theta <= 0 for theta in self.thetas(bound) or ()):
                found.append(f"--{bound.replace('_', '-')}: thresholds must be above 0")
        return found

    @property
    def gpt(self) -> SmallGpt:
        """Sizes of the model; a step has one micro-batch."""
        return SmallGpt(self.hidden, self.layers, self.sequence, self.vocab, self.micro_batch, micro_batches=1)

    def thetas(self, bound: str) -> tuple[float, ...] | None:
        """The thresholds that were given for a kind of bound."""
        return {ABSOLUTE: self.absolute, SPIKE_AWARE: self.spike_aware}[bound]

    @property
    def num_runs(self) -> int:
        """Runs of the whole campaign."""
        given = [self.thetas(bound) for bound in BOUNDS]
        return 2 * self.seeds * (1 + sum(len(SHARES) if thetas is None else len(thetas) for thetas in given))

    @property
    def fault_probabilities(self) -> dict[int, float]:
        """Probability, by decade of the factor and for each sign, of a fault in a parameter's gradient in a step."""
        return {decade: self.fault_probability * FALL ** (decade - 1) for decade in DECADES}
