"""Model, text, faults and bounds of a run of the campaign on gradient bounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.config import DataSection, HookSpec, RunConfig, parse_config
from megasdc.config.sections.faults import COLLECTIVE
from megasdc.config.sections.optimizer_hooks import ABSOLUTE, BOUNDS, SPIKE_AWARE
from megasdc.errors import ConfigError

REPLICAS = 2
HARMED_REPLICA = 1
GRACE_STEPS: int = HookSpec.model_fields["grace_steps"].default
"""First steps, in which a spike-aware bound does not act yet, and no gradient is measured."""
HEAD_WIDTH = 32
DECADES = range(1, 13)
FALL = 0.7
"""Probability of a factor of 10^k over that of 10^(k-1): the larger, the rarer, but the largest do come."""
HARMED_ELEMENTS = 2
SHARES = {"tight": 1e-2, "moderate": 1e-4, "loose": 1e-6}
"""Share of the elements of healthy gradients that a theta may bound."""
NONE = "none"


@dataclass(frozen=True)
class Setting:
    """What bounds gradients in a run.

    Args:
        bound: ``none``, ``absolute`` or ``spike_aware``.
        theta: its threshold; None without a bound.
        chosen: ``tight``, ``moderate`` or ``loose``; empty where theta was given, and without a bound.
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
class BoundTrainOptions:
    """Size of a campaign.

    Args:
        steps: of each run.
        seeds: runs of each kind; a seed decides on initial weights and on faults.
        hidden: width h.
        layers: transformer layers.
        sequence: tokens s of a sample.
        vocab: entries of the vocabulary that is trained; without effect with ``data``.
        micro_batch: samples b of a step and replica.
        learning_rate: largest one of the schedule.
        fault_probability: that 10^1 harms a parameter's gradient in a step, for each sign; 10^k less and less.
        eval_samples: validation samples.
        precision: fp32 or bf16.
        data: folder of prepared data; None: the standard library is prepared.
        absolute: thresholds; None: three are chosen.
        spike_aware: likewise.

    Raises:
        ConfigError: naming every option that is out of range.
    """

    steps: int = 400
    seeds: int = 3
    hidden: int = 64
    layers: int = 2
    sequence: int = 64
    vocab: int = 1024
    micro_batch: int = 8
    learning_rate: float = 5e-3
    fault_probability: float = 0.01
    eval_samples: int = 256
    precision: str = "fp32"
    data: str | None = None
    absolute: tuple[float, ...] | None = None
    spike_aware: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        least = {"steps": GRACE_STEPS + 1, **dict.fromkeys(("seeds", "hidden", "layers", "sequence", "micro_batch"), 1)}
        problems = [
            f"--{name.replace('_', '-')}: {getattr(self, name)} must be at least {value}"
            for name, value in least.items()
            if getattr(self, name) < value
        ]
        if self.hidden % HEAD_WIDTH:
            problems.append(f"--hidden: {self.hidden} must be a multiple of {HEAD_WIDTH}, the width of a head")
        if not 0 < self.fault_probability <= 1:
            problems.append(f"--fault-probability: {self.fault_probability} must be above 0 and at most 1")
        for bound in BOUNDS:
            if any(theta <= 0 for theta in self.thetas(bound) or ()):
                problems.append(f"--{bound.replace('_', '-')}: thresholds must be above 0")
        if problems:
            raise ConfigError(problems, source="the benchmark's options")

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
        """By decade of the factor, for each sign: that a parameter's gradient is harmed in a step."""
        return {decade: self.fault_probability * FALL ** (decade - 1) for decade in DECADES}


def parse_thetas(name: str, text: str | None) -> tuple[float, ...] | None:
    """Thresholds with commas between; an empty text is none of them, None stays None.

    Args:
        name: of the option.
        text: as given.

    Raises:
        ConfigError: one is no number.
    """
    if text is None:
        return None
    try:
        return tuple(float(one) for one in text.split(",") if one.strip())
    except ValueError:
        raise ConfigError(f"{name}: {text!r} must be numbers with commas between, such as 2e-4,1e-3") from None


def prepared_section(options: BoundTrainOptions, folder: Path) -> DataSection:
    """Data section of the standard library's own modules, to be prepared in a folder."""
    return DataSection.model_validate(
        {
            "path": str(folder),
            "split": [8, 1, 1],
            "sources": [{"kind": "stdlib", "pattern": "*.py"}],
            "tokenizer": {"vocab_size": options.vocab, "train_characters": 1_000_000},
        }
    )


def run_config(
    options: BoundTrainOptions, data: str, folder: Path, setting: Setting, seed: int, *, faulty: bool
) -> RunConfig:
    """The configuration of one run.

    Args:
        options: sizes.
        data: folder of prepared data.
        folder: where the run writes.
        setting: its bound.
        seed: of weights and faults.
        faulty: whether one replica is harmed.
    """
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": options.learning_rate, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "warmup_num_steps": max(2, options.steps // 10),
                "total_num_steps": options.steps,
                "warmup_type": "linear",
                "cos_min_ratio": 0.1,
            },
        },
        "megasdc": {
            "model": {
                "num_layers": options.layers,
                "hidden_size": options.hidden,
                "num_attention_heads": options.hidden // HEAD_WIDTH,
                "max_positions": options.sequence,
            },
            "data": {"path": data, "sequence_length": options.sequence},
            "parallel": {"threads": 1, "timeout_s": 600.0},
            "training": {
                "steps": options.steps,
                "seed": seed,
                "eval_interval": options.steps,
                "eval_samples": options.eval_samples,
            },
            "logging": {"run_dir": str(folder), "interval": options.steps, "progress_bar": False},
            "optimizer_hooks": hooks_of(setting),
            "faults": fault_specs(options, seed) if faulty else [],
        },
    }
    if options.precision == "bf16":
        raw["bf16"] = {"enabled": True}
    return parse_config(raw, source="the benchmark's options")


def hooks_of(setting: Setting) -> list[dict[str, Any]]:
    """The setting as ``optimizer_hooks``."""
    return [] if setting.theta is None else [{"hook": setting.bound, "theta": setting.theta}]


def fault_specs(options: BoundTrainOptions, seed: int) -> list[dict[str, Any]]:
    """Heavy-tailed faults on the gradient that one replica gives to the sum: factors of +-10 to +-10^12.

    Both signs, because a wrong element that keeps its sign points downhill once it is bounded.
    """
    return [
        {
            "phase": COLLECTIVE,
            "replica": HARMED_REPLICA,
            "kind": "scale",
            "factor": sign * 10.0**decade,
            "elements": HARMED_ELEMENTS,
            "probability": probability,
            "seed": seed,
        }
        for decade, probability in options.fault_probabilities.items()
        for sign in (1, -1)
    ]


def as_request(options: BoundTrainOptions, data: str, folder: Path) -> dict[str, Any]:
    """What the ranks are told."""
    return {"options": asdict(options), "data": data, "folder": str(folder)}


def from_request(request: dict[str, Any]) -> tuple[BoundTrainOptions, str, Path]:
    """What ``as_request`` was given."""
    lists = {name: tuple(value) for name, value in request["options"].items() if isinstance(value, list)}
    return BoundTrainOptions(**{**request["options"], **lists}), request["data"], Path(request["folder"])
