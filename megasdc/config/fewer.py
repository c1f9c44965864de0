"""Settings with which a run goes on with fewer replicas: the same samples each step."""

from __future__ import annotations

import math
from dataclasses import replace

from megasdc.config.checks import BatchLayout
from megasdc.config.load import RunConfig, parse_config


def settings_for(config: RunConfig, whole: BatchLayout, replicas: int) -> list[str]:
    """What must be set for a number of replicas, texts ``a.b.c=value``.

    Where too few would be left without one more, the run is halted where that one would have been isolated.

    Args:
        whole: layout of all replicas.
        replicas: that go on.
    """
    settings = []
    if replicas < whole.data and "gradient_accumulation_steps" in config.deepspeed:
        size, micro = whole.train_batch_size, whole.micro_batch_size
        settings += [
            f"train_batch_size={size}",
            f"train_micro_batch_size_per_gpu={micro}",
            f"gradient_accumulation_steps={math.ceil(size / (micro * replicas))}",
        ]
    sdc = config.megasdc.sdc
    if replicas <= sdc.isolation.min_replicas:
        settings += [f"megasdc.sdc.policy.{name}=halt" for name in sdc.policy.isolating]
    return settings


def with_replicas(config: RunConfig, whole: BatchLayout, replicas: int) -> RunConfig:
    """The configuration of a run that goes on with fewer replicas.

    Raises:
        ConfigError: something in it contradicts that.
    """
    fewer = parse_config(config.resolved(), settings_for(config, whole, replicas), config.source, stored=True)
    return replace(fewer, allow_changed=config.allow_changed)
