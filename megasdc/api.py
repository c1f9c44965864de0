"""The Python API, by the names of ``megasdc``: ``train``, ``attach``, ``compare`` and ``load_weights``.

They compose all storeys. What each imports, it imports when it is called: some of it needs PyTorch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from megasdc.attached.attach import Guard
    from megasdc.attached.trainer import TrainerGuard
    from megasdc.config.guard import GuardSettings
    from megasdc.lab.checkpoints.outcome import ComparisonOutcome
    from megasdc.ops.launch.front import LaunchResult

Word = Literal["off", "standard", "strict"]
"""Preset that protects a training; see ``docs/guides/protect.md``."""
CONFIG_FILE = "config.json"
"""Name of the file in the run folder with a configuration that was given as a dictionary."""


def train(
    config: Path | str | Mapping[str, Any],
    *,
    num_ranks: int | None = None,
    hostfile: Path | str | None = None,
    protect: Word | None = None,
    overrides: Sequence[str] = (),
    allow_changed: Sequence[str] = (),
) -> LaunchResult:
    """Train, and return when the run has ended: as ``megasdc launch``, with its checks, messages and records.

    A run folder with a checkpoint is resumed. Call it from a program that is no rank itself.

    Args:
        config: the run's JSON file, or what it holds, which is then written to ``config.json`` in the run folder.
        num_ranks: ranks on each host; None: all slots of the hostfile, and on this host the fewest that the layout and
            the batch sizes allow.
        hostfile: DeepSpeed's hostfile; None: this host alone.
        protect: preset that protects the run, in place of the file's `protect`: off, standard or strict.
        overrides: texts ``a.b.c=value``.
        allow_changed: paths ``a.b.c`` of fields that may differ from the checkpoint that the run resumes from.

    Returns:
        How it ended, with ``run_dir`` and the sentences in ``lines``.

    Raises:
        ConfigError: the configuration or its layout is wrong; lists all problems.
        MegasdcError: the run could not start, or has failed: the class of the first failed rank's exit code;
            LaunchError also where this process is a rank.

    Collective: none; the ranks are other processes.
    """
    from megasdc.common.errors import LaunchError, error_of_rank
    from megasdc.config.checks import smallest_layout
    from megasdc.config.load import load_config, parse_config
    from megasdc.ops.launch.front import launch_run
    from megasdc.ops.launch.request import LaunchRequest

    if "RANK" in os.environ:
        raise LaunchError(
            f"RANK is {os.environ['RANK']}: this process is a rank of a launch, each of which would start a run; call "
            "megasdc.train in a program that is started once, by python"
        )
    if protect is not None:
        overrides = [f"megasdc.protect={protect}", *overrides]
    if isinstance(config, Mapping):
        checked = parse_config(dict(config), overrides)
        path = _written(dict(config), Path(checked.megasdc.logging.run_dir))
    else:
        path, checked = Path(config), load_config(config, overrides, allow_changed)
    if num_ranks is None and hostfile is None:
        num_ranks = smallest_layout(checked).world_size
    request = LaunchRequest(
        path,
        hostfile=None if hostfile is None else Path(hostfile),
        num_gpus=num_ranks,
        overrides=tuple(overrides),
        allow_changed=tuple(allow_changed),
    )
    result = launch_run(request)
    if result.exit_code:
        raise error_of_rank(result.exit_code)("\n".join(result.lines))
    return result


def _written(config: dict[str, Any], run_dir: Path) -> Path:
    """The file in the run folder that a configuration is written to.

    Raises:
        StorageError: it cannot be written.
    """
    from megasdc.common.errors import StorageError
    from megasdc.common.program import write_atomically

    path = run_dir / CONFIG_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another logging.run_dir") from error
    return path


def attach(
    engine: Any,
    settings: Path | str | Mapping[str, Any] | GuardSettings | None = None,
    *,
    protect: Word | None = None,
) -> Guard | TrainerGuard:
    """Protect a training: call after ``deepspeed.initialize``, on all ranks.

    Arguments, result and errors are those of ``megasdc.attached.attach.attach``.

    Collective: all ranks of the world; with a ``Trainer`` none before training begins.
    """
    from megasdc.attached import attach as attached
    from megasdc.ops.health.attached import build_phases, build_stragglers

    return attached.attach(engine, settings, [build_stragglers, build_phases], protect=protect)


def compare(
    *checkpoints: Path | str,
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
    weights_only: bool = False,
    ulp: int = 0,
    rtol: float = 0.0,
) -> ComparisonOutcome:
    """Compare checkpoints bit by bit, as ``megasdc compare``; nothing is printed or written.

    Args:
        *checkpoints: two or more, of any format that the command takes, or manifests of them.
        only: patterns of the tensors to compare, such as ``*.mlp.*``; empty: all.
        ignore: patterns of tensors and values to skip.
        weights_only: whether the optimizer's states are left out.
        ulp: allowed difference of equal elements, in representable values.
        rtol: allowed relative difference of equal elements.

    Returns:
        The report: ``same``, the differences in ``as_dict()``, and in ``problems`` what could not be compared beside.

    Raises:
        ValueError: the arguments contradict.
        CheckpointError: one cannot be read, they have nothing in common, or nothing differs and something could not
            be compared, which is no agreement.

    Collective: none.
    """
    from megasdc.common.errors import CheckpointError
    from megasdc.lab.checkpoints.pages.comparison import compare_paths, usage_problem
    from megasdc.lab.checkpoints.report import Options

    paths, options = [Path(one) for one in checkpoints], Options(tuple(only), tuple(ignore), weights_only, ulp, rtol)
    if problem := usage_problem(paths, options):
        raise ValueError(problem)
    report = compare_paths(paths, options).report
    if report.same and report.problems:
        raise CheckpointError("\n".join(report.problems))
    return report


def load_weights(checkpoint: Path | str) -> dict[str, Tensor]:
    """Load the weights of a checkpoint of any layout, whole, on the CPU, once its files are verified.

    Args:
        checkpoint: a checkpoint, a folder of several, of which the newest whole one is taken, or a folder made by
            ``megasdc import-hf``.

    Returns:
        By the names that comparisons print, such as ``3.layer.mlp.linear_fc1.weight``: the whole tensor, in the dtype
        in which it was saved, the vocabulary [v, h] without its padding.

    Raises:
        CheckpointError: there are no usable weights; names every damaged file.

    Collective: none.
    """
    from megasdc.checkpoint.weights import open_weights
    from megasdc.model.sharding import parameter_splits, split_name, torch_name

    source = open_weights(checkpoint)
    names: dict[int, list[tuple[str, str]]] = {}
    for name in parameter_splits(source.model):
        index, rest = split_name(name)
        names.setdefault(index, []).append((torch_name(name), torch_name(rest)))
    found: dict[str, Tensor] = {}
    for index, own in sorted(names.items()):
        layer = source.layer(index)
        found |= {name: layer[rest] for name, rest in own}
    return found
