"""With how many hosts a run can go on, and the settings that follow: whole replicas, and the same samples each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megasdc.common.errors import ConfigError
from megasdc.config import check_layout, load_config, settings_for

_OTHER_LAYOUT = "megasdc.checkpoint.other_layout=convert"
"""Each attempt goes on from whatever layout the one before had."""


def find_sizes(
    config_path: Path,
    overrides: Sequence[str],
    slots: Mapping[str, int],
    num_hosts: int,
    min_hosts: int | None,
) -> tuple[dict[int, tuple[str, ...]], dict[int, str]]:
    """Find the numbers of hosts that a run can have.

    Args:
        overrides: of the configuration.
        slots: ranks of each host.
        num_hosts: that it should have.
        min_hosts: least number; None: it needs all of them.

    Returns:
        Settings of an attempt by number of hosts, ascending, as of ``--set``; and why others are not possible.

    Raises:
        ConfigError: the configuration is wrong, or the run needs all its hosts although fewer are asked for.
    """
    if min_hosts is None:
        return {num_hosts: ()}, {}
    if min_hosts > num_hosts:
        raise ConfigError(f"megasdc.supervise.min_hosts: got {min_hosts}, but the run has {num_hosts} hosts; set null.")
    if len(set(slots.values())) > 1:
        counts = ", ".join(f"{host} has {count}" for host, count in slots.items())
        raise ConfigError(f"megasdc.supervise.min_hosts: got {min_hosts}, which needs hosts of equal slots; {counts}.")
    ranks = next(iter(slots.values()))
    config = load_config(config_path, overrides)
    whole = check_layout(config, num_hosts * ranks)
    sizes, problems = dict[int, tuple[str, ...]](), dict[int, str]()
    for hosts in range(min_hosts, num_hosts + 1):
        replicas = max(1, hosts * ranks // (whole.tensor * whole.pipeline))
        settings = [_OTHER_LAYOUT, *settings_for(config, whole, replicas)]
        try:
            layout = check_layout(load_config(config_path, [*overrides, *settings]), hosts * ranks)
        except ConfigError as error:
            problems[hosts] = error.problems[0]
            continue
        if (layout.train_batch_size, layout.micro_batch_size) == (whole.train_batch_size, whole.micro_batch_size):
            sizes[hosts] = tuple(settings)
        else:
            problems[hosts] = f"its {whole.train_batch_size} samples of a step cannot be divided among them"
    if len(sizes) < 2 and min_hosts < num_hosts:
        reasons = "; ".join(f"with {hosts}: {problem}" for hosts, problem in problems.items())
        raise ConfigError(f"megasdc.supervise.min_hosts: got {min_hosts}, but the run needs all {num_hosts}: {reasons}")
    return sizes, problems
